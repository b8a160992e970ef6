"""MLX delegate for ExecuTorch, with token sampling inside the model."""

from ._load import load_delegate
from .llm import SamplingHead
from .partitioner import MLXPartitioner
from .preprocess import MLXBackend

__all__ = ["MLXBackend", "MLXPartitioner", "SamplingHead", "load_delegate"]
