"""Compiles an FX graph to a program in the MLX IR. The entry points are `ProgramBuilder` and `assemble`."""
