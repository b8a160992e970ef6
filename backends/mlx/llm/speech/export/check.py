"""The check of a speech export: runs the finished file and the eager model on a random sound, and compares them."""

from __future__ import annotations

from pathlib import Path

import torch

from ....verification.cost import Cost
from ....verification.load import load_methods
from ....verification.noise import RoundingNoise
from ....verification.rounding import agree, compare
from ...export.check import ProgramCheck
from ...export_options import HeadConfig
from .decoder import ProgramModel
from .methods import example_inputs, example_samples

_SAMPLES = 16000 * 5  # 5 seconds
_STEPS = 8  # calls of `forward`
_DEPARTURE = "the method encode or forward departs; the check of speech models does not locate the instruction"


def check_program(path: Path, program_model: ProgramModel, head: HeadConfig, start_token: int) -> ProgramCheck:
    """Compare the encoder states and greedy tokens of the file `path` with those of `program_model`.

    `program_model` is the module that was exported. `encode` gets a sound of random samples. The first call of
    `forward` gets two tokens: `start_token`, with which a transcript begins, and the token in the
    middle of the vocabulary. Each later call gets one token: the argmax of the logits of `program_model` in the call
    before.
    """
    cost = Cost()
    samples = example_samples(program_model, _SAMPLES)
    methods = load_methods(path, ["encode", "forward"])
    with torch.no_grad():
        with RoundingNoise(0):
            noisy_states = program_model.encode(samples)
            noisy = _logits(program_model, torch.tensor([[start_token]]), 0)
        states = program_model.encode(samples)
        # How much rounding noise changes the logits after the start token.
        delta = noisy - _logits(program_model, torch.tensor([[start_token]]), 0)
        found = methods["encode"]([samples])[0]
        comparison = compare(found.float()[0], states.float()[0], [noisy_states.float()[0]])
        tokens = torch.tensor([[start_token, program_model.vocab_size // 2]])
        agreeing = position = steps = 0
        while steps < _STEPS and position + tokens.shape[1] <= program_model.max_context_len:
            inputs = example_inputs(program_model, head, tokens.shape[1])
            inputs |= {"tokens": tokens, "input_pos": torch.tensor([position])}
            drawn = methods["forward"](list(inputs.values()))[0]
            logits = _logits(program_model, tokens, position)
            agreeing += int(agree(drawn, logits, [logits + delta]))
            position, steps = position + tokens.shape[1], steps + 1
            tokens = logits.argmax(-1, keepdim=True)
    return ProgramCheck(
        tokens=steps,
        agreeing=agreeing,
        difference=comparison.difference,
        tolerance=comparison.tolerance,
        compared="encoder states",
        values_ok=comparison.ok,
        note=None,
        departure=None if comparison.ok and agreeing == steps else _DEPARTURE,
        seconds=cost.seconds,
        added_memory=cost.added_memory,
        peak_before=cost.peak_before,
    )


def _logits(program_model: ProgramModel, tokens: torch.Tensor, position: int) -> torch.Tensor:
    return program_model(tokens, torch.tensor([position])).float()
