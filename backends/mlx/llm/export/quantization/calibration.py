"""Measures a model on a text: its perplexity, and the mean squares of the inputs of its linear layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..packed import is_linear, stacked_weights

_WINDOW_TOKENS = 512  # the largest size of a window: a piece of the text that one forward pass takes
_CALIBRATION_WINDOWS, _HELD_OUT_WINDOWS = 4, 2  # the largest numbers of windows to calibrate and to measure on
_MAX_CHARACTERS = 100_000  # the part of the text that is tokenized, which is more than the windows need


@dataclass
class Text:
    """The token ids of two parts of a text: `calibration` to calibrate on, `held_out` to measure the perplexity on.

    Each part is cut into windows of S tokens: [windows, S].
    """

    name: str
    calibration: torch.Tensor
    held_out: torch.Tensor

    @classmethod
    def read(cls, tokenizer: Any, path: Path | None, vocabulary: int) -> Text:
        """Read the text file at `path`. If `path` is None, take the language reference of Python's standard library.

        Raises ValueError if the file cannot be read, or is too short to be split.
        """
        if path is None:
            from pydoc_data.topics import topics

            name, text = "Python's reference", "\n\n".join(topics[key] for key in sorted(topics))
        else:
            try:
                name, text = path.name, path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"export_llm: calibrate: {path}: {error}") from error
        ids = tokenizer(text[:_MAX_CHARACTERS], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([i for i in ids if i < vocabulary])
        window = min(_WINDOW_TOKENS, len(ids) // 3)
        if window < 16:
            raise ValueError(f"export_llm: calibrate: {name}: got {len(ids)} tokens, expected at least 48")
        windows = ids[: len(ids) // window * window].view(-1, window)
        held_out = max(1, min(_HELD_OUT_WINDOWS, len(windows) // 3))
        last = min(len(windows), _CALIBRATION_WINDOWS + held_out)
        return cls(name, windows[: last - held_out], windows[last - held_out : last])


@dataclass(frozen=True)
class Perplexity:
    """The perplexity of a model before and after the quantization, on a text of `tokens` tokens.

    `int8` is the perplexity after the quantization with activations in 8 bits, or None if activations are floats.
    """

    before: float
    after: float
    text: str
    tokens: int
    int8: float | None = None

    RATIO_LIMIT = 1.1  # `str` warns if `ratio` is larger

    @property
    def ratio(self) -> float:
        return (self.int8 or self.after) / self.before

    def __str__(self) -> str:
        int8 = "" if self.int8 is None else f", {self.int8:.2f} with activations in 8 bits"
        line = (
            f"{self.before:.2f} before and {self.after:.2f} after the quantization{int8}: {self.ratio:.3f} times, on "
            f"{self.tokens} tokens of {self.text}"
        )
        is_low = self.ratio <= self.RATIO_LIMIT
        return line if is_low else f"{line}; warning: it rises by more than {self.RATIO_LIMIT - 1:.0%}"


@torch.no_grad()
def perplexity(model: torch.nn.Module, windows: torch.Tensor) -> float:
    """Return the perplexity of `model` on token ids [windows, S]. The windows do not see each other."""
    losses = []
    with linear_layers_in_float32(model):
        for window in windows:
            logits = model(window[None], use_cache=False).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]))
    return float(torch.stack(losses).mean().exp())


@torch.no_grad()
def importance(model: torch.nn.Module, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the mean squares [K] of the inputs of the linear layers, path → tensor, over token ids [windows, S]."""
    sums: dict[str, torch.Tensor] = {}

    def watch(path):
        def hook(_, inputs):
            sums[path] = sums.get(path, 0) + inputs[0].flatten(0, -2).float().square().mean(0) / len(windows)

        return hook

    handles = [m.register_forward_pre_hook(watch(path)) for path, m in model.named_modules() if is_linear(m)]
    try:
        with linear_layers_in_float32(model):
            for window in windows:
                model(window[None], use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return sums


@contextlib.contextmanager
def linear_layers_in_float32(model: torch.nn.Module) -> Iterator[None]:
    """Make the linear layers and embeddings of `model` compute in float32, whatever the dtype of their weights.

    A weight is converted when it is used. A model with experts or `LayerNorm` stays as it is, because these modules
    reject float32 inputs if their weights are in half precision.
    """
    changed = []
    if not any(stacked_weights(module) or isinstance(module, torch.nn.LayerNorm) for module in model.modules()):
        for module in model.modules():
            if is_linear(module) and module.weight.dtype in (torch.float16, torch.bfloat16):
                module.forward = _Float32Linear(module)
                changed.append(module)
    handle = None
    if changed:
        handle = model.get_input_embeddings().register_forward_hook(lambda _, __, y: y.float())
    try:
        yield
    finally:
        for module in changed:
            del module.forward
        if handle is not None:
            handle.remove()


class _Float32Linear:
    """The forward of a linear layer with half-precision weights, in float32."""

    def __init__(self, layer: torch.nn.Linear):
        self.layer = layer

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.layer.bias
        return torch.nn.functional.linear(x.float(), self.layer.weight.float(), None if bias is None else bias.float())
