// A stand-in for the module Tokenizers of swift-transformers: the part of its API that examples/ios uses. A message
// becomes the bytes of its content, each of which is a token.
import Foundation

public typealias Message = [String: any Sendable]

public protocol Tokenizer: Sendable {
  func applyChatTemplate(messages: [Message]) throws -> [Int]
}

struct Bytes: Tokenizer {
  func applyChatTemplate(messages: [Message]) throws -> [Int] {
    messages.flatMap { ($0["content"] as! String).utf8.map(Int.init) }
  }
}

public enum AutoTokenizer {
  public static func from(modelFolder: URL) async throws -> any Tokenizer { Bytes() }
}
