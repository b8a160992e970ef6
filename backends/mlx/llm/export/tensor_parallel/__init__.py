"""Splits a language model into parts for the processes of a group: tensor parallelism.

`plan` finds out from the exported graphs which weights can be split, and `parts` writes the program of each process.
"""
