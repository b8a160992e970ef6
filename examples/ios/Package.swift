// swift-tools-version:5.9
import PackageDescription

let package = Package(
  name: "PortableModel",
  platforms: [.iOS(.v17), .macOS(.v14)],
  products: [.library(name: "PortableModel", targets: ["PortableModel"])],
  dependencies: [
    .package(url: "https://github.com/pytorch/executorch.git", branch: "swiftpm-1.5.1"),
    .package(url: "https://github.com/huggingface/swift-transformers.git", from: "1.1.4"),
  ],
  targets: [
    .target(
      name: "PortableModel",
      dependencies: [
        .product(name: "executorch", package: "executorch"),
        .product(name: "backend_mlx", package: "executorch"),
        .product(name: "kernels_optimized", package: "executorch"),
        .product(name: "Tokenizers", package: "swift-transformers"),
      ])
  ])
