"""What differs between the speech models: the encoder, and how many samples it takes in a call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, WhisperFeatureExtractor

from .features import LogMel

SAMPLE_RATE = 16000


@dataclass
class Family:
    """A speech model of `transformers` and its encoder's input.

    - `extractor`: the feature extractor of the checkpoint, or None.
    - `seconds`: the longest sound of a call that the user asks for.
    - `min_samples`, `max_samples`: the limits of the number of samples in a call.
    - `multiple`: the number of samples is a multiple of this number.
    - `has_fixed_length`: whether every call has `max_samples` samples.

    Raises ValueError, with the name of the setting of the checkpoint that is not supported.
    """

    model: PreTrainedModel
    extractor: Any
    seconds: float

    min_samples: int = 0
    max_samples: int = 0
    multiple: int = 1
    has_fixed_length: bool = False

    def __post_init__(self):
        rate = getattr(self.extractor, "sampling_rate", SAMPLE_RATE)
        if rate != SAMPLE_RATE:
            raise unsupported("sampling_rate", rate, SAMPLE_RATE)
        self.prepare()
        if self.max_samples < self.min_samples:
            raise ValueError(
                f"export_speech: max_seconds: got {self.seconds:g}, expected at least "
                f"{self.min_samples / SAMPLE_RATE:.3f}"
            )

    def prepare(self) -> None:
        """Set the limits, and make the encoder exportable."""
        raise NotImplementedError

    def features(self) -> torch.nn.Module:
        """Return the module that computes the encoder's input from samples `[1, N]`."""
        return torch.nn.Identity()

    def max_states(self) -> int:
        """Return the number of encoder states for `max_samples`."""
        return int(self.model._get_feat_extract_output_lengths(torch.tensor(self.max_samples)))

    def module_before_attention(self) -> torch.nn.Module:
        """Return the last module of the encoder before its attention layers. Not called if `has_fixed_length`."""
        raise NotImplementedError

    def encode(self, model: PreTrainedModel, features: torch.Tensor) -> torch.Tensor:
        """Return the states `[1, T, D]` of the encoder."""
        if self.has_fixed_length:
            return model.model.encoder(features).last_hidden_state
        with _independent_length(self.module_before_attention(), self.max_states()):
            return model.model.encoder(features).last_hidden_state

    def states_for_decoder(self, model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
        """Return the states from which the decoder computes keys and values."""
        return states

    def windows(self) -> list[tuple[int, int] | None]:
        """Return, for each layer of the encoder, its window `(left, right)`, or None if a state attends to all states.

        A state attends to `left` states up to and including itself, and to `right - 1` states after it.
        """
        return [None] * len(self.model.model.encoder.layers)


class Whisper(Family):
    """The encoder takes log-mel features of a fixed length."""

    def prepare(self) -> None:
        config = self.model.config
        if self.extractor is None:
            self.extractor = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
        for name, expected in (("feature_size", config.num_mel_bins), ("padding_value", 0.0), ("dither", 0.0)):
            if (got := getattr(self.extractor, name, expected)) != expected:
                raise unsupported(name, got, expected)
        encoder = self.model.model.encoder
        frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        self.min_samples = self.max_samples = frames * self.extractor.hop_length
        if self.max_samples <= self.extractor.n_fft:
            raise unsupported("max_source_positions", config.max_source_positions, "more than a frame of features")
        self.has_fixed_length = True

    def features(self) -> torch.nn.Module:
        return LogMel(self.extractor)

    def max_states(self) -> int:
        return self.model.config.max_source_positions


class Moonshine(Family):
    """The encoder takes samples."""

    def prepare(self) -> None:
        if getattr(self.extractor, "do_normalize", False):
            raise unsupported("do_normalize", True, False)
        encoder = self.model.model.encoder
        # At least two states: torch.export makes a dimension dynamic only if its length is never 1. The loop goes from
        # the number of states back to the number of samples.
        length = 2
        for conv in (encoder.conv3, encoder.conv2, encoder.conv1):
            length = (length - 1) * conv.stride[0] + conv.kernel_size[0]
        self.min_samples, self.max_samples = length, int(self.seconds * SAMPLE_RATE)

    def module_before_attention(self) -> torch.nn.Module:
        return self.model.model.encoder.conv3

    def max_states(self) -> int:
        length, encoder = self.max_samples, self.model.model.encoder
        for conv in (encoder.conv1, encoder.conv2, encoder.conv3):
            length = (length - conv.kernel_size[0]) // conv.stride[0] + 1
        return length


class MoonshineStreaming(Family):
    """The encoder takes a whole number of frames of samples. In each layer, a state attends to a window around it."""

    def prepare(self) -> None:
        if getattr(self.extractor, "do_normalize", False):
            raise unsupported("do_normalize", True, False)
        config = self.model.config
        encoder = config.encoder_config
        if encoder.sample_rate != SAMPLE_RATE:
            raise unsupported("encoder_config.sample_rate", encoder.sample_rate, SAMPLE_RATE)
        embedder = self.model.model.encoder.embedder
        self.multiple = embedder.frame_len
        stride = embedder.conv1.stride[0] * embedder.conv2.stride[0] * self.multiple
        limit = config.max_position_embeddings * stride
        self.max_samples = math.floor(min(self.seconds * SAMPLE_RATE, limit) / self.multiple) * self.multiple
        self.min_samples = 2 * stride  # two states: torch.export makes a dimension dynamic only if it is never 1

    def module_before_attention(self) -> torch.nn.Module:
        return self.model.model.encoder.embedder.conv2

    def states_for_decoder(self, model: PreTrainedModel, states: torch.Tensor) -> torch.Tensor:
        decoder = model.model.decoder
        return decoder.proj(states + decoder.pos_emb(torch.arange(states.shape[1], device=states.device)))

    def windows(self) -> list[tuple[int, int] | None]:
        return [(left, right) for left, right in self.model.config.encoder_config.sliding_windows]


FAMILIES = {"whisper": Whisper, "moonshine": Moonshine, "moonshine_streaming": MoonshineStreaming}


@contextmanager
def _independent_length(module: torch.nn.Module, max_length: int) -> Iterator[None]:
    """A context in which the length of the result `[1, D, T]` of `module` is a symbol of its own.

    Otherwise, the length is an expression of the number of samples, which `torch.export` would have to solve for each
    later operator. That takes minutes, and fails for some operators.
    """

    def narrow(_module, _inputs, result):
        x, *rest = result if isinstance(result, tuple) else (result,)
        length = (torch.arange(x.shape[2])[-1] + 1).item()
        torch._check(length >= 2)
        torch._check(length <= max_length)
        x = x.narrow(2, 0, length)
        return (x, *rest) if rest else x

    hook = module.register_forward_hook(narrow)
    try:
        yield
    finally:
        hook.remove()


def unsupported(name: str, got: Any, expected: Any) -> ValueError:
    return ValueError(f"export_speech: model: {name}: got {got}, expected {expected}")
