"""The check of a speech export: runs the finished file and the eager model on a sound like speech, and compares."""

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
from .families import SAMPLE_RATE
from .methods import clamped_length, example_inputs

_SECONDS = 5
_NOISY_RUNS = 4  # a few states amplify rounding far more than the others, and not in every run
# How many times as far from eager torch as the noisy runs a state may lie: more than elsewhere, because the largest of
# several 100,000 deviations is compared.
_SPREAD_FACTOR = 16
_SEED = 20
_STEPS = 8  # calls of `forward`
_DEPARTURE = "the method encode or forward departs; the check of speech models does not locate the instruction"


def check_program(path: Path, program_model: ProgramModel, head: HeadConfig, start_token: int) -> ProgramCheck:
    """Compare the encoder states and greedy tokens of the file `path` with those of `program_model`.

    `program_model` is the module that was exported. `encode` gets `speech_like` samples. The first call of
    `forward` gets two tokens: `start_token`, with which a transcript begins, and the token in the
    middle of the vocabulary. Each later call gets one token: the argmax of the logits of `program_model` in the call
    before. If the program has `align`, this method gets three tokens. The tolerances come from several runs of the
    encoder, of one call of the decoder and of `align` with rounding noise.
    """
    cost = Cost()
    samples = speech_like(clamped_length(program_model, _SECONDS * SAMPLE_RATE))
    has_align = bool(program_model.alignment_heads)
    methods = load_methods(path, ["encode", "forward", *["align"] * has_align])
    start = torch.tensor([[start_token]])
    aligned = torch.tensor([[start_token, program_model.vocab_size // 2, program_model.vocab_size // 3]])

    def values() -> list[torch.Tensor]:
        results = [program_model.encode(samples).float()[0], _logits(program_model, start, 0)]
        return results + ([program_model.align(aligned)] if has_align else [])

    with torch.no_grad():
        noisy = []
        for seed in range(_NOISY_RUNS):
            with RoundingNoise(seed):
                noisy.append(values())
        states, logits, *attention = values()
        changes = [noisy_logits - logits for _, noisy_logits, *_ in noisy]
        found = [methods["encode"]([samples])[0].float()[0]]
        found += [methods["align"]([aligned])[0]] if has_align else []
        runs = [[run[0], *run[2:]] for run in noisy]
        comparisons = [
            compare(a, e, [run[i] for run in runs], _SPREAD_FACTOR)
            for i, (a, e) in enumerate(zip(found, [states, *attention], strict=True))
        ]
        comparison = max(comparisons, key=lambda comparison: comparison.excess)
        tokens = torch.tensor([[start_token, program_model.vocab_size // 2]])
        agreeing = position = steps = 0
        while steps < _STEPS and position + tokens.shape[1] <= program_model.max_context_len:
            inputs = example_inputs(program_model, head, tokens.shape[1])
            inputs |= {"tokens": tokens, "input_pos": torch.tensor([position])}
            drawn = methods["forward"](list(inputs.values()))[0]
            logits = _logits(program_model, tokens, position)
            agreeing += int(agree(drawn, logits, [logits + change for change in changes]))
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


def speech_like(count: int) -> torch.Tensor:
    """Return samples `[1, N]` of a sound like speech: N is `count`.

    A voice of gliding pitch, whose harmonics have formants, speaks syllables with pauses between them, over faint
    noise.
    """
    time = torch.arange(count, dtype=torch.float64) / SAMPLE_RATE
    pitch = 130 + 30 * (2 * torch.pi * 0.6 * time).sin()
    phase = (2 * torch.pi * pitch / SAMPLE_RATE).cumsum(0)
    voice = torch.zeros_like(time)
    for harmonic in range(1, 24):
        frequency = harmonic * pitch
        formants = sum((-(((frequency - center) / 250) ** 2)).exp() for center in (500, 1500, 2500))
        voice += formants * (harmonic * phase).sin() / harmonic**0.5
    syllables = (2 * torch.pi * 3 * time).sin().clamp(min=0) * ((time % 1.7) < 1.2)
    faint = 1e-3 * torch.randn(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return (0.2 * voice * syllables + faint).float().unsqueeze(0)


def _logits(program_model: ProgramModel, tokens: torch.Tensor, position: int) -> torch.Tensor:
    return program_model(tokens, torch.tensor([position])).float()
