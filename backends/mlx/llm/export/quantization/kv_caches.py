"""KV caches in half precision, and quantized KV caches: rotated layers, and the error against caches of floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ....custom_ops.quantized_cache import EntryFormat, dequantize, quantize
from ..attention.cache import LayerSpec
from ..attention.observe import Specs
from ..decoder import CachedDecoder
from ..precision import compute_dtype
from .calibration import Text

_GROUP_SIZE = 32
_MAX_TOKENS = 512  # the largest number of tokens in the run that measures the errors
_SEED = 22
# The number of bits → a limit. The groups of a layer are rotated if its squared error with rotation is less than the
# limit times its squared error without. With 8 bits, the error is so small that a rotation, which takes time, only pays
# off for outliers.
_ROTATION_LIMITS = {8: 0.25, 4: 0.9}


@dataclass(frozen=True)
class KVQuantization:
    """How the KV caches are quantized, and what that changes.

    - `bits`: 8 or 4 bits, in groups of 32 numbers with a scale and a bias.
    - `layers`, `rotated`: the number of layers with a cache, and in how many of them the groups are rotated.
    - `error`: the root mean square error of the cached numbers, relative to their root mean square.
    - `logits`: the root mean square error of the logits, relative to their root mean square.
    - `perplexity`: the perplexity with caches of floats and with the quantized caches, on a text of `tokens` tokens, or
      None without a tokenizer.
    """

    bits: int
    rotated: int
    layers: int
    error: float
    logits: float
    tokens: int
    perplexity: tuple[float, float] | None

    def __str__(self) -> str:
        parts = [f"{self.bits} bits, {self.rotated} of {self.layers} layers rotated; relative error {self.error:.1e}"]
        parts.append(f"of the logits {self.logits:.1e}")
        if self.perplexity:
            before, after = self.perplexity
            parts.append(f"perplexity {after / before:.4f} times that of float caches, on {self.tokens} tokens")
        return ", ".join(parts)


def half_precision(decoder: CachedDecoder) -> Specs:
    """Return the specs of `decoder` with caches of float16, unless the model itself computes in half precision."""
    if compute_dtype(decoder.model) != torch.float32:
        return decoder.specs
    return _with_caches(decoder.specs, lambda spec: {"dtype": torch.float16})


def _with_caches(specs: Specs, fields: Callable[[LayerSpec], dict[str, Any]]) -> Specs:
    """Return `specs` with other values for the fields that `fields` returns for each of them."""
    layers = [spec if spec is None else dataclasses.replace(spec, **fields(spec)) for spec in specs]
    return Specs(layers, specs.states, specs.recurrences)


def quantize_caches(decoder: CachedDecoder, bits: int, tokenizer: Any) -> tuple[Specs, KVQuantization]:
    """Return the specs of `decoder` with quantized caches, and a description of what these caches change.

    Runs the decoder on a part of Python's language reference. If `tokenizer` is None, runs it on random tokens.
    The model of `decoder` then has other caches, and `decoder` cannot be used any more.
    """
    tokens, is_text = _tokens(decoder, tokenizer)
    plain = _decoder(decoder, decoder.specs, tokens.shape[1])
    states = _record(plain)
    expected = _logits(plain, tokens)
    errors, rotated = [], 0
    formats: dict[str, EntryFormat] = {}
    for name, tensors in states.items():
        choices = [EntryFormat(_GROUP_SIZE, bits, rotate) for rotate in (False, True)]
        without, with_rotation = (_squared_error(tensors, format) for format in choices)
        rotate = with_rotation < _ROTATION_LIMITS[bits] * without
        rotated += rotate
        formats[name] = choices[rotate]
        errors.append(with_rotation if rotate else without)
    specs = _with_caches(decoder.specs, lambda spec: {"format": formats[spec.name]})
    logits = _logits(_decoder(decoder, specs, tokens.shape[1]), tokens)
    difference = (logits - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    perplexity = (_perplexity(expected, tokens), _perplexity(logits, tokens)) if is_text else None
    error = (sum(errors) / max(1, len(errors))) ** 0.5
    return specs, KVQuantization(bits, rotated, len(formats), error, float(difference), tokens.shape[1], perplexity)


def _tokens(decoder: CachedDecoder, tokenizer: Any) -> tuple[torch.Tensor, bool]:
    """Return tokens [1, S], and whether they are those of a text. Otherwise, they are random."""
    vocabulary = decoder.model.config.get_text_config().vocab_size
    limit = min(_MAX_TOKENS, decoder.max_context_len)
    if tokenizer is not None:
        return Text.read(tokenizer, None, vocabulary).held_out.reshape(1, -1)[:, :limit], True
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(vocabulary, (1, min(64, limit)), generator=generator), False


def _decoder(decoder: CachedDecoder, specs, length: int) -> CachedDecoder:
    return CachedDecoder(decoder.model, max_context_len=length, chunk=min(decoder.chunk, length), specs=specs).eval()


@torch.no_grad()
def _logits(decoder: CachedDecoder, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [S, V] of all tokens, which are given in chunks."""
    parts, position = [], 0
    for chunk in tokens.split(decoder.chunk, 1):
        parts.append(decoder(chunk, torch.tensor([position]), all_positions=True)[0].float())
        position += chunk.shape[1]
    return torch.cat(parts)


def _perplexity(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:]).exp())


def _record(decoder: CachedDecoder) -> dict[str, list[torch.Tensor]]:
    """Return an empty dictionary, which the first call of `decoder` fills.

    It maps the name of a layer to the tensors that the layer caches: keys and values, or only keys that contain the
    values.
    """
    states: dict[str, list[torch.Tensor]] = {}

    def record(layer):
        update = layer.update

        def recording(key_states, value_states, *args, **kwargs):
            tensors = [key_states, value_states]
            if layer.spec.values is None:
                tensors = [torch.cat(tensors, -1)]
            states.setdefault(layer.name, tensors)
            return update(key_states, value_states, *args, **kwargs)

        layer.update = recording

    for layer in decoder.cache.kv_layers:
        record(layer)
    return states


def _squared_error(tensors: list[torch.Tensor], format: EntryFormat) -> float:
    """Return the mean square error of quantized tensors, relative to their mean square."""
    entries, scales = quantize(tensors, format, torch.float32)
    first, error, total = 0, 0.0, 0.0
    for x in tensors:
        y = dequantize(entries, scales, first, x.shape[-1], format, torch.float32)
        error += float((y - x.float()).square().sum())
        total += float(x.float().square().sum())
        first += format.groups(x.shape[-1])
    return error / max(total, 1e-30)
