"""Inspect a `.pte` file without running it: instructions, types, memory and the graph."""
