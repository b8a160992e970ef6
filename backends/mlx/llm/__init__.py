"""Language models: the sampling head."""

from .sampling import SamplingHead

__all__ = ["SamplingHead"]
