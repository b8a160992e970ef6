"""The methods of a speech model's program: `encode`, `forward`, the decoder with the sampling head, and `align`."""

from __future__ import annotations

import inspect

import torch

from ....custom_kernel_ops.logprobs import token_logprobs, top_logprobs
from ...export_options import HeadConfig
from ...sampling_head import adjust_logits, sample_logits
from ...sampling_parameters import INPUTS
from .decoder import ProgramModel


def clamped_length(program_model: ProgramModel, count: int) -> int:
    """Return `count` samples, clamped to the limits of the encoder and rounded down to its `multiple`."""
    family = program_model.family
    return min(family.max_samples, max(family.min_samples, count)) // family.multiple * family.multiple


def example_inputs(program_model: ProgramModel, head: HeadConfig, length: int) -> dict[str, torch.Tensor]:
    """Return inputs of `forward` with `length` tokens, by name.

    They are in the order of the arguments. All parameters have their off values.
    """
    inputs = {"tokens": torch.zeros(1, length, dtype=torch.int64), "input_pos": torch.zeros(1, dtype=torch.int64)}
    inputs |= head.inputs(1, program_model.vocab_size)
    if program_model.timestamp_begin is not None:
        inputs["timestamps"] = torch.tensor(0)
    return inputs


def export_methods(program_model: ProgramModel, head: HeadConfig) -> dict[str, torch.export.ExportedProgram]:
    """Export the methods. Returns the exported programs by name of the method."""
    methods = {"encode": _export_encode(program_model), "forward": _export_forward(program_model, head)}
    return methods | ({"align": _export_align(program_model)} if program_model.alignment_heads else {})


class Encode(torch.nn.Module):
    """`encode` of a program. It has the same structure as `Forward`, so that both share weights and buffers by name."""

    def __init__(self, program_model: ProgramModel):
        super().__init__()
        self.program_model = program_model

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.program_model.encode(samples)


class Align(torch.nn.Module):
    """`align` of a program."""

    def __init__(self, program_model: ProgramModel):
        super().__init__()
        self.program_model = program_model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.program_model.align(tokens)


class Forward(torch.nn.Module):
    """`forward` of a program: returns the token that is drawn after `tokens`."""

    def __init__(self, program_model: ProgramModel, num_logprobs: int):
        super().__init__()
        self.program_model, self.num_logprobs = program_model, num_logprobs

    def forward(self, tokens, input_pos, logprobs=None, timestamps=None, **parameters):
        logits = self.program_model(tokens, input_pos)
        adjustments = {name: parameters.pop(name) for name in ADJUSTMENTS if name in parameters}
        adjusted = adjust_logits(logits, **adjustments)
        if timestamps is not None:
            adjusted = prefer_timestamps(adjusted, self.program_model.timestamp_begin, timestamps)
        drawn = sample_logits(adjusted, **parameters)
        if not self.num_logprobs:
            return drawn
        return drawn, token_logprobs(logits, drawn, logprobs), *top_logprobs(logits, logprobs, self.num_logprobs)


ADJUSTMENTS = ("bias_tokens", "bias_values", "allowed_tokens")  # the parameters of `adjust_logits`

# torch.export takes the names and the order of the inputs from the signature, and `**parameters` has none.
_ARGUMENTS = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", "tokens", "input_pos")]
_ARGUMENTS += [
    inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in (*INPUTS, "logprobs", "timestamps")
]
Forward.forward.__signature__ = inspect.Signature(_ARGUMENTS)  # type: ignore[attr-defined]


def prefer_timestamps(logits: torch.Tensor, begin: int, enabled: torch.Tensor) -> torch.Tensor:
    """Return the logits under Whisper's rule for timestamps: tokens that may not be drawn get -inf.

    The rule: if all timestamps together are likelier than any other single token, only timestamps may be drawn. In
    `logits` `[B, V]`, tokens that other rules exclude are -inf already. The timestamps are the tokens from `begin` on.
    If `enabled` is 0, the logits do not change.
    """
    logits = logits.float()
    text, times = logits[:, :begin], logits[:, begin:]
    largest = times.amax(1, keepdim=True)
    finite = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    mass = (times - finite).exp().sum(1, keepdim=True).log() + finite
    is_preferred = (mass > text.amax(1, keepdim=True)) & (enabled != 0)
    return torch.cat([text.masked_fill(is_preferred, -torch.inf), times], 1)


def _export_encode(program_model: ProgramModel) -> torch.export.ExportedProgram:
    family, shapes = program_model.family, None
    if not family.has_fixed_length:
        multiples = torch.export.Dim(
            "frames", min=family.min_samples // family.multiple, max=family.max_samples // family.multiple
        )
        shapes = {"samples": {1: multiples if family.multiple == 1 else family.multiple * multiples}}
    with torch.no_grad():
        # The example is the longest sound. torch's shape rules for convolutions compare sizes: with a shorter example,
        # the exported program would accept only some of the lengths.
        count = clamped_length(program_model, family.max_samples)
        example = torch.randn(1, count, generator=torch.Generator().manual_seed(20)) * 0.1
        return torch.export.export(Encode(program_model), (example,), dynamic_shapes=shapes)


def _export_forward(program_model: ProgramModel, head: HeadConfig) -> torch.export.ExportedProgram:
    inputs = example_inputs(program_model, head, 2)
    shapes = dict.fromkeys(inputs) | {"tokens": {1: torch.export.Dim("sequence", min=1, max=program_model.chunk)}}
    args = inputs.pop("tokens"), inputs.pop("input_pos")
    with torch.no_grad():
        return torch.export.export(Forward(program_model, head.logprobs), args, inputs, dynamic_shapes=shapes)


def _export_align(program_model: ProgramModel) -> torch.export.ExportedProgram:
    shapes = {"tokens": {1: torch.export.Dim("sequence", min=1, max=program_model.chunk)}}
    with torch.no_grad():
        example = torch.zeros(1, 2, dtype=torch.int64)
        return torch.export.export(Align(program_model), (example,), dynamic_shapes=shapes)
