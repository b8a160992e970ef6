"""Inspects the MLX programs in a `.pte` file without running them: instructions, types, memory and the graph."""
