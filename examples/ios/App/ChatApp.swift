// The app: a field for a message, and the answer as it grows. In Xcode, add this file to an iOS app that links the
// package in the folder above, and add the files of the model to the app.
import PortableModel
import SwiftUI

@main
struct ChatApp: App {
  var body: some Scene { WindowGroup { ChatView() } }
}

struct ChatView: View {
  @Environment(\.scenePhase) private var phase
  @State private var conversation: Conversation?  // nil: the model is not loaded
  @State private var messages: [[String: String]] = []  // of a conversation whose model was dropped
  @State private var message = ""
  @State private var answer = ""
  @State private var running: Task<Void, Never>?

  var body: some View {
    VStack {
      ScrollView { Text(answer).frame(maxWidth: .infinity, alignment: .leading) }
      TextField("Message", text: $message).onSubmit(send)
      Button("Stop") { running?.cancel() }
    }
    .padding()
    .onChange(of: phase) { if phase != .active { running?.cancel() } }
    .onReceive(NotificationCenter.default.publisher(for: UIApplication.didReceiveMemoryWarningNotification)) { _ in
      drop()
    }
  }

  private func send() {
    let previous = running
    previous?.cancel()
    let sampling = Sampling(temperature: 0.8, topP: 0.95, topK: 40, seed: .random(in: 0..<1_000_000_000))
    let question = message
    running = Task {
      await previous?.value
      answer = ""
      do {
        let conversation = try await load()
        let parts = await conversation.answer(to: question, sampling)
        for try await text in parts { answer += text }
        let finish = await conversation.finish
        if finish == .context { answer += "\nThe context is full." }
      } catch {
        if !(error is CancellationError) { answer += "\n\(error)" }
      }
    }
  }

  private func load() async throws -> Conversation {
    if let conversation { return conversation }
    let path = Bundle.main.path(forResource: "phone", ofType: "pte")!
    let model = try await Task.detached { try PortableModel(path: path) }.value  // not on the main thread
    let tokenizer = Bundle.main.url(forResource: "tokenizer", withExtension: nil)!
    let loaded = try await Conversation(model, tokenizer: tokenizer, messages: messages)
    conversation = loaded
    return loaded
  }

  /// Frees the model. The next message loads it again.
  private func drop() {
    let previous = running
    previous?.cancel()
    running = Task {
      await previous?.value
      await conversation?.stop()
      messages = await conversation?.messages ?? messages
      conversation = nil
    }
  }
}
