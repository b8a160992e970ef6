// A language model that `executorch-mlx export --portable` wrote, on ExecuTorch's own runtime. Token ids in, token ids
// out. docs/in-an-app.md explains every step.
import ExecuTorch
import Foundation

/// How tokens are drawn. The default of each filter is off.
public struct Sampling: Sendable {
  public var temperature: Float  // 0: always the most likely token
  public var topP: Float  // 1: off
  public var topK: Int  // 0: off
  public var minP: Float  // 0: off
  public var seed: Int32  // the same seed gives the same answer

  public init(temperature: Float = 0, topP: Float = 1, topK: Int = 0, minP: Float = 0, seed: Int32 = 0) {
    self.temperature = temperature
    self.topP = topP
    self.topK = topK
    self.minP = minP
    self.seed = seed
  }
}

/// Why an answer ended.
public enum Finish: Sendable {
  case stop  // a token of `endTokens`
  case length  // `maxTokens`
  case context  // all positions of the caches are written
  case cancelled  // its task
}

public enum Output: Sendable {
  case token(Int)
  case end(Finish)
}

public enum PortableModelError: Error {
  case notPortable  // the file has no method forward with the inputs that this code passes
  case promptTooLong(tokens: Int, capacity: Int)
}

/// A loaded model with the KV caches of one conversation. An actor: a second answer waits for the first one.
public actor PortableModel {
  public nonisolated let chunk: Int  // the largest number of tokens in a call
  public nonisolated let capacity: Int  // positions of the caches: prompt and answer together
  public nonisolated let endTokens: Set<Int>  // a token of these ends the answer, and is not part of it
  public nonisolated let tokenTexts: TokenTexts
  private let module: Module
  private let maxRewind: Int
  private let takes: (seed: Bool, topK: Bool, minP: Bool)
  private var cached: [Int] = []  // the tokens at the positions 0, 1, …
  private var written = 0  // 1 + the highest position that was written since position 0 was

  /// Loads the file. Takes as long as it takes to read the weights, so do it in a task.
  public init(path: String) throws {
    let module = Module(filePath: path, loadMode: .mmap)
    try module.load("forward")
    let methods = try module.methodNames()
    func flag(_ name: String) throws -> Bool { methods.contains(name) ? try module.execute(name) : false }
    guard try flag("sampling_head"), try !flag("sampling_penalties"), try !flag("sampling_allowed_tokens"),
      try module.execute("sampling_logit_bias") == 0, try module.execute("sampling_logprobs") == 0
    else { throw PortableModelError.notPortable }
    takes = (try flag("sampling_seed"), try flag("sampling_top_k"), try flag("sampling_min_p"))
    chunk = try module.execute("get_max_seq_len")
    capacity = try module.execute("get_max_context_len")
    maxRewind = try module.execute("get_max_rewind")
    let ends: [Int] = try module.execute("get_eos_ids")
    endTokens = Set(ends)
    tokenTexts = TokenTexts(bytes: try module.execute("token_bytes"), offsets: try module.execute("token_offsets"))
    self.module = module
  }

  /// Draws up to `maxTokens` tokens after `prompt`, and passes each to `onToken`. Cancelling the task ends the answer
  /// before the next call. `prompt` is the whole conversation: positions that already hold its beginning are not computed
  /// again. With `maxTokens` 0, only reads the prompt.
  @discardableResult
  public func generate(
    after prompt: [Int], _ sampling: Sampling, maxTokens: Int = .max, onToken: (Int) -> Void
  ) throws -> Finish {
    guard !prompt.isEmpty, prompt.count <= capacity else {
      throw PortableModelError.promptTooLong(tokens: prompt.count, capacity: capacity)
    }
    rewind(to: commonBeginning(prompt))
    var next = 0
    while cached.count < prompt.count {  // the prompt, in chunks; only the draw of the last one counts
      if Task.isCancelled { return .cancelled }
      let end = min(cached.count + chunk, prompt.count)
      next = try draw(after: prompt[cached.count..<end], sampling, step: 0)
    }
    var count = 0  // tokens of the answer
    while true {
      if endTokens.contains(next) { return .stop }
      if Task.isCancelled { return .cancelled }
      if count < maxTokens {
        onToken(next)
        count += 1
      }
      if count == maxTokens { return .length }
      if cached.count == capacity { return .context }
      next = try draw(after: [next], sampling, step: count)
    }
  }

  /// The same as a stream. Ending the loop over it, or cancelling its task, ends the answer; the last element is lost
  /// then.
  public nonisolated func tokens(
    after prompt: [Int], _ sampling: Sampling, maxTokens: Int = .max
  ) -> AsyncThrowingStream<Output, any Error> {
    AsyncThrowingStream { continuation in
      let task = Task {
        do {
          let finish = try await self.generate(after: prompt, sampling, maxTokens: maxTokens) {
            continuation.yield(.token($0))
          }
          continuation.yield(.end(finish))
          continuation.finish()
        } catch {
          continuation.finish(throwing: error)
        }
      }
      continuation.onTermination = { _ in task.cancel() }
    }
  }

  /// Returns when the running answer has ended. A stream whose task was cancelled ends before its last call does.
  public func wait() {}

  /// One call of the program: writes the tokens at the next positions, and draws the token after the last of them.
  private func draw(after tokens: ArraySlice<Int>, _ sampling: Sampling, step: Int) throws -> Int {
    let held = cached
    let position = held.count
    var inputs: [any ValueConvertible] = [
      Tensor<Int>(Array(tokens), shape: [1, tokens.count]),  // int64 [1, S]
      Tensor<Int>([position], shape: [1]),  // int64 [1]
      Tensor<Float>(sampling.temperature),  // from here on, scalars: tensors without dimensions
      Tensor<Float>(sampling.topP),
    ]
    if takes.seed { inputs.append(Tensor<Int>(Int(sampling.seed &+ Int32(truncatingIfNeeded: step)))) }
    if takes.topK { inputs.append(Tensor<Int>(sampling.topK)) }
    if takes.minP { inputs.append(Tensor<Float>(sampling.minP)) }
    written = max(written, position + tokens.count)
    cached = []  // if the call fails, the next answer begins at position 0
    let outputs: [Value] = try module.forward(inputs)
    guard let drawn: Tensor<Int> = outputs.first?.tensor() else { throw PortableModelError.notPortable }
    cached = held + tokens
    return drawn.scalars()[0]
  }

  /// How many tokens of the caches can stay for this prompt. At least its last token is computed.
  private func commonBeginning(_ prompt: [Int]) -> Int {
    let equal = zip(cached, prompt.dropLast()).prefix { $0 == $1 }.count
    return written - equal <= maxRewind || written == equal ? equal : 0
  }

  private func rewind(to position: Int) {
    cached.removeLast(cached.count - position)
    if position == 0 { written = 0 }
  }
}
