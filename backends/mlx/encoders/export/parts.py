"""The parts of an embedding model after its transformer: pooling, dense layers and normalization, as torch modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from .checkpoint import EncoderFolder, Part

# What sentence-transformers calls the ways to pool, in older settings `pooling_mode_NAME`, in the order of the parts of
# a pooled vector.
_CLS, _MAX, _MEAN, _SQRT, _WEIGHTED, _LAST = "cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"
MODES = (_CLS, _MAX, _MEAN, _SQRT, _WEIGHTED, _LAST)
_OLD_NAMES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
_NAME = "sentence_embedding"  # what sentence-transformers calls the vector of a text
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU")


class Pooling(torch.nn.Module):
    """Makes a vector `[B, D * modes]` of the vectors `[B, L, D]` of the tokens. `mask` `[B, L]` is 0 for padding.

    Vectors of padding have no effect, also if they are NaN.
    """

    def __init__(self, modes: tuple[str, ...]):
        super().__init__()
        self.modes = modes

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        pooled = [self._pooled(mode, hidden.float(), mask) for mode in self.modes]
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, 1)

    def _pooled(self, mode: str, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if mode == _CLS:
            return hidden[:, 0]
        if mode == _LAST:
            last = (mask.sum(1) - 1).clamp(min=0)
            return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        is_token = (mask != 0)[:, :, None]
        if mode == _MAX:
            return torch.where(is_token, hidden, -1e9).amax(1)
        weights = is_token.to(hidden.dtype)
        if mode == _WEIGHTED:
            weights = weights * torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[None, :, None]
        total = (torch.where(is_token, hidden, 0.0) * weights).sum(1)
        count = weights.sum(1).clamp(min=1e-9)
        return total / (count.sqrt() if mode == _SQRT else count)


class Normalize(torch.nn.Module):
    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(vectors, dim=-1)


def pooling_modes(encoder: EncoderFolder) -> tuple[str, ...]:
    """Return how vectors are pooled. A checkpoint that does not say so is pooled by the mean.

    Raises ValueError for an unknown setting.
    """
    part = next((part for part in encoder.parts or () if part.kind == "Pooling"), None)
    if part is None:
        return (_MEAN,)
    where = f"export_encoder: model: {part.folder / 'config.json'}"
    given = part.settings.get("pooling_mode")
    named = [given] if isinstance(given, str) else given
    modes = named or [mode for mode in MODES if part.settings.get(_OLD_NAMES[mode])]
    if not modes or not set(modes) <= set(MODES):
        raise ValueError(f"{where}: pooling_mode: got {modes}, expected some of {', '.join(MODES)}")
    if part.settings.get("include_prompt", True) is False and encoder.settings.get("prompts"):
        raise ValueError(f"{where}: include_prompt: got false, expected true: the tokens of a prompt are pooled")
    return tuple(modes)


def stages(encoder: EncoderFolder, dtype: torch.dtype) -> tuple[list[torch.nn.Module], bool]:
    """Return the modules after the pooling in order, and whether the last one normalizes.

    Raises ValueError for a part that is not supported, and for damaged weights.
    """
    found: list[torch.nn.Module] = []
    normalizes = False
    for index, part in enumerate(encoder.parts or ()):
        if part.kind in ("Pooling", "Dropout"):
            if part.kind == "Pooling" and index > 0:
                raise ValueError(f"export_encoder: model: {part.folder}: Pooling: expected after the transformer")
            continue
        if part.kind not in _MAKERS:
            known = ", ".join(("Pooling", "Dropout", *_MAKERS))
            raise ValueError(f"export_encoder: model: {part.folder}: got the part {part.kind}, expected one of {known}")
        found.append(_MAKERS[part.kind](part).eval().requires_grad_(False).to(dtype))
        normalizes = part.kind == "Normalize"
    return found, normalizes


def _dense(part: Part) -> torch.nn.Module:
    settings = part.settings
    for name, expected in (("use_residual", False), ("module_input_name", _NAME), ("module_output_name", _NAME)):
        if (got := settings.get(name) or expected) != expected:
            raise ValueError(f"export_encoder: model: {part.folder}: {name}: got {got}, expected {expected}")
    layer = torch.nn.Linear(settings["in_features"], settings["out_features"], bias=settings.get("bias", True))
    _load(layer, part.folder, "linear.")
    name = str(settings.get("activation_function", "torch.nn.modules.linear.Identity")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"export_encoder: model: {part.folder}: activation_function: got {name}, expected one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return torch.nn.Sequential(layer, getattr(torch.nn, name)())


def _layer_norm(part: Part) -> torch.nn.Module:
    layer = torch.nn.LayerNorm(part.settings["dimension"])
    _load(layer, part.folder, "norm.")
    return layer


def _load(layer: torch.nn.Module, folder: Path, prefix: str) -> None:
    path = folder / "model.safetensors"
    old = folder / "pytorch_model.bin"
    try:
        tensors = load_file(path) if path.is_file() else torch.load(old, map_location="cpu", weights_only=True)
        layer.load_state_dict({name.removeprefix(prefix): tensor.float() for name, tensor in tensors.items()})
    except (RuntimeError, OSError, AttributeError) as error:
        raise ValueError(f"export_encoder: model: {folder}: {error}") from error


_MAKERS: dict[str, Callable[[Part], torch.nn.Module]] = {
    "Dense": _dense,
    "LayerNorm": _layer_norm,
    "Normalize": lambda part: Normalize(),
}
