"""The command `executorch-mlx`: look into a program, look over an installation."""
