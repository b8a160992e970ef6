"""What the workers for llama.cpp have in common."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np


class Context:
    """A model with its KV cache. `params` are fields of llama.cpp's context parameters."""

    def __init__(self, path: str, threads: int, **params: Any) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        settings = llama_cpp.llama_context_default_params()
        for name, value in (params | {"n_threads": threads, "n_threads_batch": threads}).items():
            setattr(settings, name, value)
        self.handle = llama_cpp.llama_init_from_model(model, settings)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def decode(self, batch: llama_cpp.llama_batch) -> None:
        """Append the tokens of the batch to the cache."""
        if llama_cpp.llama_decode(self.handle, batch):
            raise RuntimeError("llama_decode failed")

    def most_likely(self, index: int) -> int:
        """The most likely token after token `index` of the last batch; -1 is its last token."""
        logits = ctypes.cast(llama_cpp.llama_get_logits_ith(self.handle, index), ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
