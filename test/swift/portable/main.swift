// portable MODEL.pte TEMPERATURE TOP_K SEED COUNT IDS...: prints the tokens of the answer to each prompt, why it ended, and
// its text.
import PortableModel

let arguments = CommandLine.arguments
let model = try PortableModel(path: arguments[1])
let sampling = Sampling(temperature: Float(arguments[2])!, topK: Int(arguments[3])!, seed: Int32(arguments[4])!)
for ids in arguments.dropFirst(6) {
  let prompt = ids.split(separator: ",").map { Int($0)! }
  var answer: [Int] = []
  var stream = TextStream(model.tokenTexts)
  var text = ""
  for try await output in model.tokens(after: prompt, sampling, maxTokens: Int(arguments[5])!) {
    switch output {
    case .token(let token):
      answer.append(token)
      text += stream.text(adding: token)
    case .end(let finish): print(answer.map(String.init).joined(separator: ","), finish, text.debugDescription)
    }
  }
}
