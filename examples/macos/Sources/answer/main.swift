// answer MODEL.pte IDS: prints the answer to a prompt of token ids, such as 0,354,264.
import LanguageModel

let model = try LanguageModel(path: CommandLine.arguments[1])
let prompt = CommandLine.arguments[2].split(separator: ",").compactMap { Int64($0) }
var sampling = Sampling()
sampling.temperature = 0.8
sampling.topK = 40
sampling.seed = 7
sampling.maxTokens = 32
for try await piece in model.answer(to: prompt, sampling) {
  print(piece.text, terminator: "")
}
print()
