// A chat: messages to token ids with the model's chat template, and the ids of the answer to text.
import Foundation
import Tokenizers

public actor Conversation {
  private let model: PortableModel
  private let tokenizer: any Tokenizer
  private var messages: [[String: any Sendable]] = []

  /// `tokenizer` is a folder with tokenizer.json and tokenizer_config.json of the checkpoint.
  public init(model path: String, tokenizer folder: URL) async throws {
    model = try PortableModel(path: path)
    tokenizer = try await AutoTokenizer.from(modelFolder: folder)
  }

  /// Streams the answer to a message of the user.
  public nonisolated func answer(to message: String, _ sampling: Sampling) -> AsyncThrowingStream<String, any Error> {
    AsyncThrowingStream { continuation in
      let task = Task {
        do {
          try await self.answer(to: message, sampling) { continuation.yield($0) }
          continuation.finish()
        } catch {
          continuation.finish(throwing: error)
        }
      }
      continuation.onTermination = { _ in task.cancel() }
    }
  }

  private func answer(to message: String, _ sampling: Sampling, onText: @Sendable (String) -> Void) async throws {
    messages.append(["role": "user", "content": message])
    let prompt = try tokenizer.applyChatTemplate(messages: messages)
    var stream = TextStream(model.tokenTexts)
    var answer = ""
    for try await token in model.tokens(after: prompt, sampling) {
      let text = stream.text(adding: token)
      answer += text
      onText(text)
    }
    messages.append(["role": "assistant", "content": answer])
  }
}
