"""The command `executorch-mlx`: export, run, serve, inspect and doctor. And the script `mlx_llm_runner`."""
