"""GGUF files: their block formats, architectures and tokenizers. `file` loads a model from such a file."""
