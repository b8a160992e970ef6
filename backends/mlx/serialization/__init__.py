"""The MLX IR: the schema, the Python classes generated from it, and the reader and writer of MLX programs.

This folder imports no other part of the package.
"""
