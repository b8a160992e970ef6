"""Changes to what torch, ExecuTorch and transformers do. Each module names the reason; without the reason, it can go.

A function of theirs is replaced only within a context manager. Importing these modules changes nothing.
"""
