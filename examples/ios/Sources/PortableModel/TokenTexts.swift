// The text of tokens. The file of the model holds the bytes of all tokens, so no tokenizer is needed to show an answer.
import ExecuTorch
import Foundation

public struct TokenTexts: Sendable {
  private let bytes: [UInt8]  // of all tokens, one after the other
  private let offsets: [Int]  // of each token in `bytes`, and the end

  init(bytes: Tensor<UInt8>, offsets: Tensor<Int>) {
    self.bytes = bytes.scalars()
    self.offsets = offsets.scalars()
  }

  /// The UTF-8 bytes of a token that the model has drawn. They may be a part of a character. Special tokens have none.
  public func bytes(of token: Int) -> ArraySlice<UInt8> { bytes[offsets[token]..<offsets[token + 1]] }
}

/// Joins the bytes of tokens to text.
public struct TextStream: Sendable {
  private let texts: TokenTexts
  private var held: [UInt8] = []  // the beginning of a character whose other bytes follow with the next token

  public init(_ texts: TokenTexts) { self.texts = texts }

  /// Returns the text that is complete with this token.
  public mutating func text(adding token: Int) -> String {
    held += texts.bytes(of: token)
    let complete = held.count - beginningOfCharacter(held)
    defer { held.removeFirst(complete) }
    return String(decoding: held.prefix(complete), as: UTF8.self)
  }

  /// Returns what is left at the end of the answer: U+FFFD if it ends within a character.
  public mutating func end() -> String {
    defer { held = [] }
    return String(decoding: held, as: UTF8.self)
  }

  /// The number of bytes at the end that begin a character without completing it.
  private func beginningOfCharacter(_ bytes: [UInt8]) -> Int {
    for (index, byte) in bytes.suffix(3).reversed().enumerated() where byte & 0xC0 != 0x80 {
      let length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1
      return length > index + 1 ? index + 1 : 0
    }
    return 0
  }
}
