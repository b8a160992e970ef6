"""The console scripts `executorch-mlx`, with a module for each of its commands, and `mlx_llm_runner`."""
