// The C API of the engine for Swift: a model that answers many requests at once, each as an AsyncSequence.
import ExecutorchMLX
import Foundation

/// An error of the C API. The message names the argument that is wrong.
public struct EngineError: Error, CustomStringConvertible {
  public let status: Int32  // executorch_mlx_status
  public let description: String
}

private func check(_ status: executorch_mlx_status) throws {
  guard status == 0 else {
    throw EngineError(status: status, description: String(cString: executorch_mlx_last_error()))
  }
}

/// Why an answer ended.
public enum Finish: Int32, Sendable {
  case stop = 1  // a stop token or a stop string
  case length  // `maxTokens`
  case context  // the context is full
  case cancelled
  case error
}

public struct Sampling: Sendable {
  public var temperature: Float = 0  // 0: always the most likely token
  public var topP: Float = 1
  public var topK: Int64 = 0
  public var minP: Float = 0
  public var seed: Int64?  // nil: a random seed
  public var maxTokens: Int64 = 0  // 0: until the context is full
  public var stop: [String] = []

  public init() {}
}

/// A part of an answer. `token` is nil, or `text` empty, where a character or a possible stop string is not complete.
public struct Piece: Sendable {
  public let token: Int64?
  public let text: String
  public let finish: Finish?  // of the last piece
}

/// A loaded model and its engine, which runs on a thread of its own. All functions may be called from any thread. Those
/// that throw wait for the engine: call them in a task, not on the main thread.
public final class LanguageModel: @unchecked Sendable {
  private let model: OpaquePointer
  private let engine: OpaquePointer

  /// Called with the part of the weights that is loaded, up to 1. Returning false ends the load, which then throws.
  public typealias OnProgress = (Double) -> Bool

  /// Loads a file that `executorch-mlx export` wrote. With `lowPriority`, the engine's thread has the quality of service
  /// "utility", for work that nobody waits for.
  public init(path: String, lowPriority: Bool = false, onProgress: OnProgress = { _ in true }) throws {
    var model: OpaquePointer?
    var engine: OpaquePointer?
    try withoutActuallyEscaping(onProgress) { onProgress in
      var onProgress = onProgress
      try withUnsafeMutablePointer(to: &onProgress) { onProgress in
        var options = executorch_mlx_default_load_options()
        options.on_progress = { user, part in user!.assumingMemoryBound(to: OnProgress.self).pointee(part) }
        options.user_data = UnsafeMutableRawPointer(onProgress)
        options.low_priority = lowPriority
        try check(executorch_mlx_model_load(path, &options, &model))
      }
    }
    do {
      try check(executorch_mlx_engine_create(model, nil, &engine))
    } catch {
      executorch_mlx_model_free(model)
      throw error
    }
    self.model = model!
    self.engine = engine!
  }

  deinit {  // waits for the running step
    executorch_mlx_engine_free(engine)
    executorch_mlx_model_free(model)
  }

  /// The files of the tokenizer, which the program holds: "tokenizer_json" and "tokenizer_config".
  public func data(_ name: String) throws -> [UInt8] {
    var data: UnsafeRawPointer?
    var size = 0
    try check(executorch_mlx_model_get_data(model, name, &data, &size))
    return Array(UnsafeRawBufferPointer(start: data, count: size))
  }

  /// Streams the answer to a prompt. Ending the loop over it, or cancelling its task, cancels the request.
  public func answer(to prompt: [Int64], _ sampling: Sampling = Sampling()) -> AsyncThrowingStream<Piece, any Error> {
    AsyncThrowingStream { continuation in
      do {
        let request = Request(model: self, continuation)
        try request.submit(prompt, sampling)
        continuation.onTermination = { [weak request] _ in request?.cancel() }
      } catch {
        continuation.finish(throwing: error)
      }
    }
  }

  /// Reads a prompt into the caches. An answer to a prompt that begins like it then computes only the rest.
  public func prefill(_ prompt: [Int64]) throws { try check(executorch_mlx_engine_prefill(engine, prompt, prompt.count)) }

  /// Copies the caches of a conversation, so that two answers can go on from it. For files with more than one row.
  public func clone(_ ids: [Int64]) throws { try check(executorch_mlx_engine_clone(engine, ids, ids.count)) }

  /// Waits for the running step, and starts no other one until `resume()`. Answers pause, and can be cancelled.
  public func suspend() throws { try check(executorch_mlx_engine_suspend(engine)) }
  public func resume() throws { try check(executorch_mlx_engine_resume(engine)) }

  /// Frees what the engine can do without; if no answer runs, also the weights and caches, which the next answer loads
  /// again. Also while it is suspended.
  public func releaseMemory() throws { try check(executorch_mlx_engine_release_memory(engine)) }

  fileprivate func submit(
    _ options: inout executorch_mlx_request_options, _ request: UnsafeMutablePointer<OpaquePointer?>
  ) throws {
    try check(executorch_mlx_engine_submit(engine, &options, request))
  }
}

/// One request. The engine holds a reference to it until the last event.
private final class Request: @unchecked Sendable {
  private let model: LanguageModel  // the engine lives as long as its requests
  private let continuation: AsyncThrowingStream<Piece, any Error>.Continuation
  // The library writes it before it queues the request, and so before the first event.
  private let handle = UnsafeMutablePointer<OpaquePointer?>.allocate(capacity: 1)

  init(model: LanguageModel, _ continuation: AsyncThrowingStream<Piece, any Error>.Continuation) {
    self.model = model
    self.continuation = continuation
    handle.initialize(to: nil)
  }

  deinit {
    executorch_mlx_request_free(handle.pointee)
    handle.deallocate()
  }

  func cancel() { executorch_mlx_request_cancel(handle.pointee) }

  func submit(_ prompt: [Int64], _ sampling: Sampling) throws {
    var options = executorch_mlx_default_request_options()
    options.temperature = sampling.temperature
    options.top_p = sampling.topP
    options.top_k = sampling.topK
    options.min_p = sampling.minP
    options.has_seed = sampling.seed != nil
    options.seed = sampling.seed ?? 0
    options.max_new_tokens = sampling.maxTokens
    options.user_data = Unmanaged.passRetained(self).toOpaque()
    options.on_event = { user, event in
      Unmanaged<Request>.fromOpaque(user!).takeUnretainedValue().take(event!.pointee)
      return true
    }
    let stop = sampling.stop.map { UnsafePointer(strdup($0)) }
    defer { stop.forEach { free(UnsafeMutablePointer(mutating: $0)) } }
    do {
      // The library copies what the pointers refer to.
      try prompt.withUnsafeBufferPointer { prompt in
        try stop.withUnsafeBufferPointer { stop in
          options.prompt = prompt.baseAddress
          options.prompt_length = prompt.count
          options.stop = stop.baseAddress
          options.stop_count = stop.count
          try model.submit(&options, handle)  // events may come before it returns
        }
      }
    } catch {
      Unmanaged.passUnretained(self).release()
      throw error
    }
  }

  /// Called on the engine's thread.
  private func take(_ event: executorch_mlx_event) {
    let text = UnsafeRawBufferPointer(start: event.text, count: event.text_length)
    let finish = Finish(rawValue: event.finish)
    let isStop = finish == .stop && event.stop_index < 0  // a stop token is not part of the answer
    continuation.yield(
      Piece(
        token: event.token < 0 || isStop ? nil : event.token,
        text: String(decoding: text, as: UTF8.self),
        finish: finish))
    guard let finish else { return }
    if finish == .error {
      var info = executorch_mlx_request_info()
      info.size = MemoryLayout.size(ofValue: info)
      executorch_mlx_request_get_info(handle.pointee, &info)
      let message = String(cString: executorch_mlx_request_error(handle.pointee))
      continuation.finish(throwing: EngineError(status: info.status, description: message))
    } else {
      continuation.finish()
    }
    Task { Unmanaged.passUnretained(self).release() }  // not here: a request is not freed within its own event
  }
}
