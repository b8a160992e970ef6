// swift-tools-version:5.9
// python tools/macos/build_xcframework.py examples/macos builds ExecutorchMLX.xcframework beside this file.
import PackageDescription

let package = Package(
  name: "LanguageModel",
  platforms: [.macOS(.v14)],
  products: [.library(name: "LanguageModel", targets: ["LanguageModel", "ExecutorchMLX"])],
  targets: [
    .binaryTarget(name: "ExecutorchMLX", path: "ExecutorchMLX.xcframework"),
    .target(name: "LanguageModel", dependencies: ["ExecutorchMLX"]),
    .executableTarget(name: "answer", dependencies: ["LanguageModel"]),
  ])
