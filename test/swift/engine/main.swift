// engine MODEL.pte IDS: prints what the functions of LanguageModel do, and how errors look.
import LanguageModel

let path = CommandLine.arguments[1]
let prompt = CommandLine.arguments[2].split(separator: ",").compactMap { Int64($0) }
var parts: [Double] = []
let model = try LanguageModel(path: path) {
  parts.append($0)
  return true
}
print("loaded", parts.last!)
do {
  _ = try LanguageModel(path: path) { _ in false }
} catch let error as EngineError {
  print("ended", error.status)
}

func answer(_ prompt: [Int64]) async throws -> [Int64] {
  var sampling = Sampling()
  sampling.maxTokens = 8
  var tokens: [Int64] = []
  for try await piece in model.answer(to: prompt, sampling) { tokens += piece.token.map { [$0] } ?? [] }
  return tokens
}

let expected = try await answer(prompt)
try model.prefill(prompt)
try model.clone(prompt)
try model.suspend()
let cancelled = Task { try await answer(prompt) }
cancelled.cancel()
print("cancelled", try await cancelled.value.count)
let waiting = Task { try await answer(prompt) }
try model.releaseMemory()
try model.resume()
print("resumed", try await waiting.value == expected)
try model.releaseMemory()
print("loaded again", try await answer(prompt) == expected)
do {
  _ = try await answer([-1])
} catch let error as EngineError {
  print(error.status, error)
}
