"""The MLX IR: its schema, its classes, and how programs are written and read.

Imports nothing of the rest of the package.
"""
