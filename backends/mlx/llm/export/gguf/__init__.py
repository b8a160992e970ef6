"""The format of GGUF files: metadata, blocks, architectures and tokenizers. `checkpoints.gguf` loads a model."""
