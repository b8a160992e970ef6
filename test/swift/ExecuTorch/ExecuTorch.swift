// A stand-in for the Swift module of ExecuTorch's package, which exists for Apple systems only: the part of its API that
// examples/ios uses, over ExecuTorch's C++ runtime.
import Shim

public struct RuntimeError: Error { public let description: String }

public protocol Scalar { static var dtype: Int8 { get } }
extension UInt8: Scalar { public static var dtype: Int8 { 0 } }
extension Int: Scalar { public static var dtype: Int8 { 4 } }
extension Float: Scalar { public static var dtype: Int8 { 6 } }
extension Bool: Scalar { public static var dtype: Int8 { 11 } }

public protocol ValueConvertible { func asValue() -> Value }
public protocol ValueConstructible { static func from(_ value: Value) throws -> Self }
public protocol ValueSequenceConstructible { static func from(_ values: [Value]) throws -> Self }

extension ValueSequenceConstructible where Self: ValueConstructible {
  public static func from(_ values: [Value]) throws -> Self {
    guard values.count == 1 else { throw RuntimeError(description: "got \(values.count) values, expected one") }
    return try Self.from(values[0])
  }
}

public final class Value: ValueConvertible {
  let dtype: Int8
  let integer: Int
  let sizes: [Int32]
  let bytes: [UInt8]

  init(dtype: Int8, integer: Int, sizes: [Int32], bytes: [UInt8]) {
    (self.dtype, self.integer, self.sizes, self.bytes) = (dtype, integer, sizes, bytes)
  }

  public func asValue() -> Value { self }

  public func tensor<T: Scalar>() -> Tensor<T>? { dtype == T.dtype ? Tensor(value: self) : nil }
}

public final class Tensor<T: Scalar>: ValueConvertible, ValueConstructible, ValueSequenceConstructible {
  let value: Value

  init(value: Value) { self.value = value }

  public init(_ scalars: [T], shape: [Int] = []) {
    let bytes = scalars.withUnsafeBytes { [UInt8]($0) }
    let sizes = shape.isEmpty ? [Int32(scalars.count)] : shape.map { Int32($0) }
    value = Value(dtype: T.dtype, integer: 0, sizes: sizes, bytes: bytes)
  }

  public init(_ scalar: T) {
    value = Value(dtype: T.dtype, integer: 0, sizes: [], bytes: withUnsafeBytes(of: scalar) { [UInt8]($0) })
  }

  public func scalars() -> [T] { value.bytes.withUnsafeBytes { [T]($0.assumingMemoryBound(to: T.self)) } }

  public func asValue() -> Value { value }

  public static func from(_ value: Value) throws -> Self {
    guard value.dtype == T.dtype else {
      throw RuntimeError(description: "got dtype \(value.dtype), expected \(T.dtype)")
    }
    return Self(value: value)
  }
}

extension Int: ValueConstructible, ValueSequenceConstructible {
  public static func from(_ value: Value) throws -> Int { value.integer }
}
extension Bool: ValueConstructible, ValueSequenceConstructible {
  public static func from(_ value: Value) throws -> Bool { value.integer != 0 }
}
extension Array: ValueSequenceConstructible where Element: ValueConstructible {
  public static func from(_ values: [Value]) throws -> [Element] { try values.map(Element.from) }
}

public enum ModuleLoadMode { case file, mmap }

public final class Module {
  private let handle: OpaquePointer?

  public init(filePath: String, loadMode: ModuleLoadMode = .file) { handle = shim_open(filePath) }
  deinit { shim_close(handle) }

  public func load(_ method: String) throws {
    guard try methodNames().contains(method) else { throw RuntimeError(description: "no method \(method)") }
  }

  public func methodNames() throws -> Set<String> {
    Set(String(cString: shim_method_names(handle)).split(separator: "\n").map(String.init))
  }

  public func execute(_ method: String, _ inputs: [ValueConvertible]) throws -> [Value] {
    let values = inputs.map { $0.asValue() }
    var given: [shim_value] = []
    for value in values {  // the arrays live until the call has returned
      value.bytes.withUnsafeBytes { bytes in
        value.sizes.withUnsafeBufferPointer { sizes in
          given.append(
            shim_value(
              dtype: value.dtype, integer: 0, rank: Int32(sizes.count), sizes: sizes.baseAddress,
              data: bytes.baseAddress))
        }
      }
    }
    let count = withExtendedLifetime(values) { shim_execute(handle, method, given, given.count) }
    guard count >= 0 else { throw RuntimeError(description: "\(method) has failed") }
    return (0..<Int(count)).map { index in
      let output = shim_output(handle, index)
      guard output.dtype >= 0 else { return Value(dtype: -1, integer: Int(output.integer), sizes: [], bytes: []) }
      let sizes = Array(UnsafeBufferPointer(start: output.sizes, count: Int(output.rank)))
      let bytes = UnsafeRawBufferPointer(start: output.data, count: shim_bytes(output))
      return Value(dtype: output.dtype, integer: 0, sizes: sizes, bytes: [UInt8](bytes))
    }
  }

  public func execute<Output: ValueSequenceConstructible>(_ method: String) throws -> Output {
    try Output.from(execute(method, []))
  }

  public func forward(_ inputs: [ValueConvertible]) throws -> [Value] { try execute("forward", inputs) }

  public func forward<Output: ValueSequenceConstructible>(_ inputs: ValueConvertible...) throws -> Output {
    try Output.from(execute("forward", inputs))
  }
}
