"""Samplers: the head of a program draws the tokens, or the host draws them from the program's logits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import torch

from ..sampling_parameters import SamplingParameters, SettingError
from . import host_sampling
from .program import LLMProgram


class Sampler:
    """Draws the tokens of one answer. `seed` is the seed of the first draw, or None if the program takes no seed."""

    seed: int | None = None

    def __init__(self, program: LLMProgram, parameters: SamplingParameters):
        self.program, self.parameters = program, parameters

    def draw(
        self,
        tokens: torch.Tensor,
        position: int,
        start: Sequence[int] | None,
        *,
        step: int,
        sequences: Sequence[Sequence[int]],
        allowed: torch.Tensor | None = None,
    ) -> list[int]:
        """Write `tokens` `[B, S]` to the cache from `position` on, and return the next token of each sequence.

        `start` is the number of padding tokens at the beginning of each sequence, or None. `step` counts
        the draws of the answer from 0. `sequences` holds all token ids of each sequence, including `tokens`.
        `allowed` is the mask of allowed tokens, int32 `[B, ceil(V / 32)]`, or None to allow all.
        """
        raise NotImplementedError

    def feed(self, tokens: torch.Tensor, position: int, start: Sequence[int] | None) -> None:
        """Write `tokens` to the cache without a draw."""
        raise NotImplementedError


class HeadSampler(Sampler):
    """A sampler that lets the sampling head of the program draw."""

    def __init__(self, program: LLMProgram, parameters: SamplingParameters):
        super().__init__(program, parameters)
        if program.takes("seed"):
            self.seed = _first_seed(parameters)

    def draw(self, tokens, position, start, *, step, sequences, allowed=None):
        seed = None if self.seed is None else seed_of_step(self.seed, step)
        return self.program.tokens(
            tokens, position, start, parameters=self.parameters, seed=seed, allowed=allowed
        )

    def feed(self, tokens, position, start):
        if self.program.has_logits:
            self.program.logits(tokens, position, start)
        else:
            self.draw(tokens, position, start, step=0, sequences=())


class HostSampler(Sampler):
    """A sampler that draws on the host from the logits of the program, with the same torch code as the head."""

    def __init__(self, program: LLMProgram, parameters: SamplingParameters):
        super().__init__(program, parameters)
        self.seed = _first_seed(parameters)

    def draw(self, tokens, position, start, *, step, sequences, allowed=None):
        logits = self.program.logits(tokens, position, start)
        window = self.program.get("sampling_history") or self.program.max_context_len
        history = [ids[-window:] for ids in sequences]
        seed = seed_of_step(self.seed, step)
        return host_sampling.sample(logits, self.parameters, seed, history, allowed).tolist()

    def feed(self, tokens, position, start):
        self.program.logits(tokens, position, start)


def sampler_for(program: LLMProgram, parameters: SamplingParameters) -> Sampler:
    """Return a sampler that supports all of `parameters`.

    That is a `HeadSampler` if the head takes all parameters, else a `HostSampler` if the program returns
    logits. Raises SettingError if neither is the case.
    """
    outside = [token for token in parameters.logit_bias if token >= program.vocab_size]
    if outside:
        raise SettingError(
            "logit_bias", f": id {outside[0]} is outside the vocabulary [0, {program.vocab_size})"
        )
    unsupported = _unsupported_by_head(program, parameters)
    if program.has_head and unsupported is None:
        return HeadSampler(program, parameters)
    if program.has_logits:
        return HostSampler(program, parameters)
    raise unsupported


def seed_of_step(first: int, step: int) -> int:
    """Return `first + step` modulo 2**64, as a signed integer."""
    seed = (first + step) % 2**64
    return seed - 2**64 if seed >= 2**63 else seed


def _unsupported_by_head(program: LLMProgram, parameters: SamplingParameters) -> SettingError | None:
    """Return the error for the first parameter that the head does not support, or None if it supports all."""
    for name in parameters.enabled():
        if not program.takes(name):
            return SettingError(
                name, f": {program.path.name} was exported without it; leave it off, or export the model again with it"
            )
    limit = program.get("sampling_logit_bias", 0)
    if len(parameters.logit_bias) > limit:
        return SettingError(
            "logit_bias", f": got {len(parameters.logit_bias)} tokens, expected at most {limit} by {program.path.name}"
        )
    return None


def _first_seed(parameters: SamplingParameters) -> int:
    """Return the seed of the first draw: `parameters.seed`, or a random seed if it is None."""
    return secrets.randbits(63) if parameters.seed is None else parameters.seed
