"""The command `executorch-mlx`: export, run, serve, inspect and doctor."""
