// chat MODEL.pte: prints what a conversation keeps of answers that end, are cancelled and fail.
import Foundation
import PortableModel

let model = try PortableModel(path: CommandLine.arguments[1])
let folder = URL(fileURLWithPath: "/")  // the stand-in of Tokenizers has no files
let sampling = Sampling(temperature: 0.8, seed: 7)

func roles(_ conversation: Conversation) async -> String {
  await conversation.messages.map { $0["role"]! }.joined(separator: " ")
}

let conversation = try await Conversation(model, tokenizer: folder)
let first = await conversation.answer(to: "abc", sampling)
for try await text in first where !text.isEmpty { break }  // ends the answer
let second = await conversation.answer(to: "def", sampling)  // waits for the end of the first one
var text = ""
for try await part in second { text += part }
print(await roles(conversation), await conversation.finish)
print(await conversation.messages.last!["content"] == text)

do {
  let tooLong = await conversation.answer(to: String(repeating: "x", count: 2000), sampling)
  for try await _ in tooLong {}
} catch PortableModelError.promptTooLong {
  print(await roles(conversation))
}

let copy = try await Conversation(model, tokenizer: folder, messages: Array(conversation.messages.prefix(2)))
let third = await copy.answer(to: "ghi", sampling)
for try await text in third where !text.isEmpty { break }
await copy.stop()
print(await roles(copy))

func read() async throws -> Finish { try await model.generate(after: [5, 17], sampling, maxTokens: 0) { _ in } }
let cancelled = Task {
  withUnsafeCurrentTask { $0?.cancel() }
  return try await read()
}
print(try await cancelled.value, try await read())
