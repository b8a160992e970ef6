"""The MLX IR: its schema, its classes, and the reader and writer of programs.

Imports nothing else of this package.
"""
