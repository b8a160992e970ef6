// The app: a field for a message, and the answer as it grows. In Xcode, add this file to an iOS app that links the
// package in the folder above, and add the files of the model to the app.
import PortableModel
import SwiftUI

@main
struct ChatApp: App {
  var body: some Scene { WindowGroup { ChatView() } }
}

struct ChatView: View {
  @State private var conversation: Conversation?
  @State private var message = ""
  @State private var answer = "Loading …"
  @State private var running: Task<Void, Never>?

  var body: some View {
    VStack {
      ScrollView { Text(answer).frame(maxWidth: .infinity, alignment: .leading) }
      TextField("Message", text: $message).onSubmit(send).disabled(conversation == nil)
      Button("Stop") { running?.cancel() }
    }
    .padding()
    .task {
      do {
        let bundle = Bundle.main
        conversation = try await Conversation(
          model: bundle.path(forResource: "phone", ofType: "pte")!,
          tokenizer: bundle.url(forResource: "tokenizer", withExtension: nil)!)
        answer = ""
      } catch {
        answer = "The model cannot be loaded: \(error)"
      }
    }
  }

  private func send() {
    guard let conversation else { return }
    running?.cancel()
    let sampling = Sampling(temperature: 0.8, topP: 0.95, topK: 40, seed: .random(in: 0..<1_000_000_000))
    let question = message
    answer = ""
    running = Task {
      do {
        for try await text in conversation.answer(to: question, sampling) { answer += text }
      } catch {
        answer += "\n\(error)"
      }
    }
  }
}
