// A chat: messages to token ids with the model's chat template, and the ids of the answer to text.
import Foundation
import Tokenizers

public actor Conversation {
  public private(set) var messages: [[String: String]]  // give them to init() to go on later
  public private(set) var finish = Finish.stop  // of the last answer
  private let model: PortableModel
  private let tokenizer: any Tokenizer
  private var running: Task<Void, Never>?

  /// `tokenizer` is a folder with tokenizer.json and tokenizer_config.json. A model has one conversation at a time.
  public init(_ model: PortableModel, tokenizer folder: URL, messages: [[String: String]] = []) async throws {
    self.model = model
    self.messages = messages
    tokenizer = try await AutoTokenizer.from(modelFolder: folder)
  }

  /// Streams the answer to a message of the user. Ends an answer that still runs, and waits for its end.
  public func answer(to message: String, _ sampling: Sampling) -> AsyncThrowingStream<String, any Error> {
    let previous = running
    previous?.cancel()
    return AsyncThrowingStream { continuation in
      let task = Task {
        await previous?.value
        do {
          try await self.answer(to: message, sampling) { continuation.yield($0) }
          continuation.finish()
        } catch {
          continuation.finish(throwing: error)
        }
      }
      running = task
      continuation.onTermination = { _ in task.cancel() }
    }
  }

  /// Ends the running answer, and returns when its text is in `messages` and the model makes no call.
  public func stop() async {
    running?.cancel()
    await running?.value
    await model.wait()
  }

  /// A message without an answer leaves no trace in `messages`.
  private func answer(to message: String, _ sampling: Sampling, onText: @escaping @Sendable (String) -> Void)
    async throws
  {
    try Task.checkCancellation()
    messages.append(["role": "user", "content": message])
    var answer = ""
    defer {
      if answer.isEmpty { messages.removeLast() } else { messages.append(["role": "assistant", "content": answer]) }
    }
    var stream = TextStream(model.tokenTexts)
    let prompt = try tokenizer.applyChatTemplate(messages: messages)
    finish = .cancelled
    for try await output in model.tokens(after: prompt, sampling) {
      let text: String
      switch output {
      case .token(let token): text = stream.text(adding: token)
      case .end(let reason): (finish, text) = (reason, stream.end())
      }
      answer += text
      onText(text)
    }
  }
}
