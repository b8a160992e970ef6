"""Who draws the next token: the program's own head, or the host from its logits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from . import host_sampling
from .program import LLMProgram
from .settings import SettingError, Settings, seed_of

Rows = Sequence[Sequence[int]]


class Sampler:
    """The draws of one answer. `seed` is that of the first one, None where it cannot be given."""

    seed: int | None = None

    def __init__(self, program: LLMProgram, settings: Settings):
        self.program, self.settings = program, settings

    def draw(
        self,
        tokens: torch.Tensor,
        position: int,
        start: Sequence[int] | None,
        *,
        step: int,
        rows: Rows,
        allowed: torch.Tensor | None = None,
    ) -> list[int]:
        """Writes `tokens` `[B, S]` at `position`; draw number `step` of what follows, for every row.

        `rows` are all ids of every row, those of `tokens` included; `allowed` is int32
        `[B, ceil(V / 32)]` or None.
        """
        raise NotImplementedError

    def feed(self, tokens: torch.Tensor, position: int, start: Sequence[int] | None) -> None:
        """Writes `tokens` without a draw."""
        raise NotImplementedError


class HeadSampler(Sampler):
    """The method of the program that returns tokens draws them."""

    def __init__(self, program: LLMProgram, settings: Settings):
        super().__init__(program, settings)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        names += ("presence_penalty", "frequency_penalty")
        self._scalars = {name: getattr(settings, name) for name in names}
        if program.takes("seed"):
            self.seed = _base(settings)

    def draw(self, tokens, position, start, *, step, rows, allowed=None):
        scalars = self._scalars
        if self.seed is not None:
            scalars = scalars | {"seed": seed_of(self.seed, step)}
        bias = self.settings.logit_bias
        return self.program.tokens(
            tokens, position, start, scalars=scalars, bias=bias, allowed=allowed
        )

    def feed(self, tokens, position, start):
        if self.program.has_logits:
            self.program.logits(tokens, position, start)
        else:
            self.draw(tokens, position, start, step=0, rows=())


class HostSampler(Sampler):
    """The program returns logits, and the text of its head runs here."""

    def __init__(self, program: LLMProgram, settings: Settings):
        super().__init__(program, settings)
        self.seed = _base(settings)

    def draw(self, tokens, position, start, *, step, rows, allowed=None):
        logits = self.program.logits(tokens, position, start)
        window = self.program.get("sampling_history") or self.program.context_len
        history = [row[-window:] for row in rows]
        seed = seed_of(self.seed, step)
        return host_sampling.sample(logits, self.settings, seed, history, allowed).tolist()

    def feed(self, tokens, position, start):
        self.program.logits(tokens, position, start)


def sampler_of(program: LLMProgram, settings: Settings) -> Sampler:
    """The sampler that honours all of `settings`; SettingError where there is none."""
    outside = [token for token in settings.logit_bias if token >= program.vocab_size]
    if outside:
        raise SettingError(
            "logit_bias", f": id {outside[0]} is outside the vocabulary [0, {program.vocab_size})"
        )
    refusal = _refusal(program, settings)
    if program.has_head and refusal is None:
        return HeadSampler(program, settings)
    if program.has_logits:
        return HostSampler(program, settings)
    raise refusal


def _refusal(program: LLMProgram, settings: Settings) -> SettingError | None:
    """What the head of `program` cannot honour."""
    absent = [name for name in settings.asked() if not program.takes(name)]
    if absent:
        return SettingError(
            absent[0],
            f" is not among the parameters that {program.path.name} was exported with; "
            "leave it off, or export the model again with it",
        )
    most = program.get("sampling_logit_bias", 0)
    if len(settings.logit_bias) > most:
        told = f" has {len(settings.logit_bias)} tokens, {program.path.name} takes at most {most}"
        return SettingError("logit_bias", told)
    return None


def _base(settings: Settings) -> int:
    # Not negative, so that it can be typed again without a thought.
    return secrets.randbits(63) if settings.seed is None else settings.seed
