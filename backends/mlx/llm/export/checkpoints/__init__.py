"""Checkpoints of other tools: mlx-lm folders, quantized folders, LoRA adapters, and checks of what was loaded.

`weights` loads any checkpoint, and calls these modules. The folder `gguf` reads GGUF files.
"""
