"""Passes over the exported graphs of a language model, which run before the graphs are lowered to MLX."""
