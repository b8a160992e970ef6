"""Contexts in which torch.export traces a model: complex numbers, the order of sets, and layers that repeat."""
