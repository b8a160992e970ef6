"""The self-check of a speech export: runs the finished file and the eager model on noise, and compares them."""

from __future__ import annotations

from pathlib import Path

import torch

from ...llm.export.check import ProgramCheck
from ...llm.export.head_config import HeadConfig
from ...verification.cost import Cost
from ...verification.load import load_methods
from ...verification.noise import RoundingNoise
from ...verification.rounding import agree, compare
from .decoder import ProgramModel
from .methods import example_inputs, example_samples

_SAMPLES = 16000 * 5
_STEPS = 8


def check_program(path: Path, decoder: ProgramModel, head: HeadConfig, start: int) -> ProgramCheck:
    """Run the file `path` and `decoder`, the module that was exported, and compare encoder states and greedy tokens.

    The encoder gets samples of noise. In the first call, the decoder gets two tokens: the start token, and the token in
    the middle of the vocabulary. In each later call, it gets the greedy token of the call before, as `decoder` has it.
    """
    cost = Cost()
    samples = example_samples(decoder, _SAMPLES)
    methods = load_methods(path, ["encode", "forward"])
    with torch.no_grad():
        with RoundingNoise(0):
            noisy_states = decoder.encode(samples)
            noisy = _logits(decoder, torch.tensor([[start]]), 0)
        states = decoder.encode(samples)
        # How much rounding noise changes the logits after the start token.
        delta = noisy - _logits(decoder, torch.tensor([[start]]), 0)
        found = methods["encode"]([samples])[0]
        comparison = compare(found.float()[0], states.float()[0], [noisy_states.float()[0]])
        tokens = torch.tensor([[start, decoder.vocab_size // 2]])
        agreeing = position = steps = 0
        while steps < _STEPS and position + tokens.shape[1] <= decoder.max_context_len:
            inputs = example_inputs(decoder, head, tokens.shape[1])
            inputs |= {"tokens": tokens, "input_pos": torch.tensor([position])}
            drawn = methods["forward"](list(inputs.values()))[0]
            logits = _logits(decoder, tokens, position)
            agreeing += int(agree(drawn, logits, [logits + delta]))
            position, steps = position + tokens.shape[1], steps + 1
            tokens = logits.argmax(-1, keepdim=True)
    return ProgramCheck(
        tokens=steps, agreeing=agreeing, difference=comparison.difference, tolerance=comparison.tolerance,
        logits_ok=comparison.ok, note=None,
        departure=None if comparison.ok and agreeing == steps else "the methods encode or forward depart",
        seconds=cost.seconds, added_memory=cost.added_memory, peak_before=cost.peak_before,
    )  # fmt: skip


def _logits(decoder: ProgramModel, tokens: torch.Tensor, position: int) -> torch.Tensor:
    return decoder(tokens, torch.tensor([position])).float()
