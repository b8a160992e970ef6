"""The self-check of an export: runs the finished file and the eager model on a short prompt and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from executorch.exir import ExecutorchProgramManager

from ...verification.cost import Cost
from ...verification.load import load
from ...verification.locate import CannotLocate, locate_in_file
from ...verification.noise import RoundingNoise
from ...verification.node_output import NodeOutput
from ...verification.rounding import compare, tolerance_of
from .attention import use_cached_attention
from .decoder import CachedDecoder
from .head_config import HeadConfig

_SEED = 20
_STEPS = 3  # decode steps
_NOISY_CALL = 1  # the number of the call that also runs with rounding noise: it has the second chunk
_SECOND_CHUNK = 8  # tokens of the prompt in the second chunk
# The number of tokens of each call that locates a departure: few, because these calls keep all intermediate values.
_SHORT_CALLS = (8, 4, 1)


class VerificationError(RuntimeError):
    """The exported program differs from the eager model by more than rounding. `check` has the numbers."""

    def __init__(self, check: ProgramCheck):
        super().__init__(f"export_llm: the program differs from the eager model beyond rounding: {check}")
        self.check = check


@dataclass(frozen=True)
class ProgramCheck:
    """The result of the check of an exported language model.

    - `tokens`: the number of greedy tokens that were compared, one for each call and sequence.
    - `agreeing`: the number of those tokens that agree: in the eager model, the token has the largest logit, or a logit
      that is as large within rounding.
    - `difference`, `tolerance`: the largest absolute difference of the logits, and the tolerance, in the call where the
      logits exceed their tolerance the most or come closest to it. None if the logits were not compared; `note` then
      says why.
    - `logits_ok`: whether the logits agree within rounding, or were not compared.
    - `departure`: if the program differs, the first instruction whose value differs from eager torch by more than
      rounding, as text, or the reason why none is named. Otherwise None.
    - `seconds`: the time of the check.
    - `peak_before`, `added_memory`: the peak memory of the process before the check, and by how much the check raised
      it, in bytes.
    """

    tokens: int
    agreeing: int
    difference: float | None
    tolerance: float | None
    logits_ok: bool
    note: str | None
    departure: str | None
    seconds: float
    added_memory: int
    peak_before: int

    @property
    def ok(self) -> bool:
        return self.logits_ok and self.agreeing == self.tokens

    def __str__(self) -> str:
        parts = [f"{self.agreeing} of {self.tokens} greedy tokens agree"]
        if self.difference is None:
            parts.append(f"logits not compared: {self.note}")
        else:
            parts.append(f"largest difference of the logits {self.difference:.1e}, tolerance {self.tolerance:.1e}")
        return "; ".join(parts) + (f"\n{self.departure}" if self.departure else "")

    def cost(self) -> str:
        """Returns the time of the check and the peak memory, as a line for the user."""
        before, after = (size / 1e9 for size in (self.peak_before, self.peak_before + self.added_memory))
        return f"verify: {self.seconds:.1f} s, peak memory {after:.2f} GB, before that {before:.2f} GB"


def check_program(
    path: Path, program: ExecutorchProgramManager, decoder: CachedDecoder, methods: dict[str, bool], head: HeadConfig
) -> ProgramCheck:
    """Run the file `path` and `decoder`, the module that was exported, and compare their logits and greedy tokens.

    The prompt is longer than one chunk if the context permits it; a few decode steps follow. In these, both the file
    and `decoder` get the token that is greedy in `decoder`. `methods` maps the name of each method to whether the
    method returns tokens.
    """
    cost = Cost()
    calls = _eager_calls(decoder, _lengths(decoder))
    runtime = _Runtime(path, program, decoder, methods, head)
    tokens, logits, note = runtime.run(calls)
    agreeing = sum(int(_agree(t, call).sum()) for t, call in zip(tokens, calls, strict=True))
    worst = None
    if logits is not None:
        comparisons = [compare(a, call.logits, call.noisy) for a, call in zip(logits, calls, strict=True)]
        worst = max(comparisons, key=lambda comparison: comparison.excess)
    ok = agreeing == len(calls) * decoder.batch and (worst is None or worst.ok)
    return ProgramCheck(
        tokens=len(calls) * decoder.batch,
        agreeing=agreeing,
        difference=None if worst is None else worst.difference,
        tolerance=None if worst is None else worst.tolerance,
        logits_ok=worst is None or worst.ok,
        note=note,
        departure=None if ok else runtime.departure(_eager_calls(decoder, _fitting(_SHORT_CALLS, decoder))),
        seconds=cost.seconds,
        added_memory=cost.added_memory,
        peak_before=cost.peak_before,
    )


@dataclass
class _Call:
    """The inputs of a call, and the logits `[B, V]` of the eager model. `noisy` are the logits with rounding noise."""

    tokens: torch.Tensor
    position: int
    start: list[int]
    logits: torch.Tensor
    noisy: list[torch.Tensor]


def _lengths(decoder: CachedDecoder) -> list[int]:
    """Returns the number of tokens of each call: the prompt in two chunks, then decode steps."""
    steps = min(_STEPS, decoder.max_context_len - 2)
    prompt = min(decoder.chunk + _SECOND_CHUNK, decoder.max_context_len - steps)
    first = min(decoder.chunk, max(1, prompt - _SECOND_CHUNK))
    return [length for length in (first, prompt - first) if length] + [1] * steps


def _fitting(lengths: Sequence[int], decoder: CachedDecoder) -> list[int]:
    """Returns `lengths`, shortened so that each fits into a chunk and all together fit into the context."""
    fitting: list[int] = []
    for length in lengths:
        length = min(length, decoder.chunk, decoder.max_context_len - sum(fitting))
        fitting += [length] if length else []
    return fitting


def _eager_calls(decoder: CachedDecoder, lengths: Sequence[int]) -> list[_Call]:
    """Run the eager model in calls with `lengths` tokens, and return the calls.

    The tokens are random, except that a later call of one token takes the greedy token of the call before. One call
    also runs with rounding noise, which shows how much rounding changes the logits; this change is added to the logits
    of every call to get `noisy`. The noise does not affect later calls, because the same call without noise overwrites
    the same positions of the caches.
    """
    generator = torch.Generator().manual_seed(_SEED)
    eager = _small_decoder(decoder, sum(lengths))
    vocab_size = decoder.model.config.get_text_config().vocab_size
    start = [index % lengths[0] for index in range(decoder.batch)]
    calls: list[_Call] = []
    delta = None
    for number, length in enumerate(lengths):
        tokens = torch.randint(vocab_size, (decoder.batch, length), generator=generator)
        if calls and length == 1:
            tokens = calls[-1].logits.argmax(-1, keepdim=True)
        position = sum(lengths[:number])
        noisy = None
        if number == min(_NOISY_CALL, len(lengths) - 1):
            with RoundingNoise(number):
                noisy = _logits(eager, tokens, position, start)
        logits = _logits(eager, tokens, position, start)
        if noisy is not None:
            delta = noisy - logits
        calls.append(_Call(tokens, position, start, logits, []))
    use_cached_attention(decoder.model, decoder.cache)  # in place of the small caches, which are freed
    for call in calls:
        call.noisy = [call.logits + delta]
    return calls


def _small_decoder(decoder: CachedDecoder, num_positions: int) -> CachedDecoder:
    """Returns a decoder with the same model, but with caches for `num_positions` only, which saves memory."""
    return CachedDecoder(
        decoder.model, batch=decoder.batch, max_context_len=num_positions, chunk=decoder.chunk, window=decoder.window
    ).eval()


def _logits(decoder: CachedDecoder, tokens: torch.Tensor, position: int, start: list[int]) -> torch.Tensor:
    """Returns the logits `[B, V]` of the last position, float32."""
    padding = torch.tensor(start) if decoder.batch > 1 else None
    with torch.no_grad():
        return decoder(tokens, torch.tensor([position]), padding)[:, -1].float()


def _agree(tokens: torch.Tensor, call: _Call) -> torch.Tensor:
    """Whether each token `[B]` has the largest logit of the eager model, or one that is as large within rounding."""
    tolerance = tolerance_of(call.logits, call.noisy)
    best = call.logits.argmax(-1, keepdim=True)
    chosen = tokens.reshape(-1, 1)
    is_valid = (chosen >= 0) & (chosen < call.logits.shape[1])
    chosen = chosen.clamp(0, call.logits.shape[1] - 1)
    gap = call.logits.gather(1, best) - call.logits.gather(1, chosen)
    return (is_valid & (gap <= tolerance.gather(1, best) + tolerance.gather(1, chosen))).reshape(-1)


def _from_the_start(calls: Sequence[_Call]) -> list[_Call]:
    """Returns the calls after the first, or the only call if there is one, moved to the positions from 0 on."""
    rest = calls[1:] or calls
    return [replace(call, position=call.position - rest[0].position, start=[0] * len(call.start)) for call in rest]


class _Runtime:
    """The finished file in the runtime."""

    def __init__(self, path, program, decoder, methods: dict[str, bool], head: HeadConfig):
        self.path, self.program, self.decoder = path, program, decoder
        self.logits_method = next((name for name, has_head in methods.items() if not has_head), None)
        self.head_method = next((name for name, has_head in methods.items() if has_head), None)
        self.head = head

    def run(self, calls: Sequence[_Call]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, str | None]:
        """Returns the greedy tokens `[B]` of each call, the logits `[B, V]` of each call, and None.

        If the logits cannot be read, returns the tokens, None and the reason.
        """
        if self.logits_method is None:
            return self._run_with_logits(calls)
        method = load(self.path, self.logits_method)
        logits = [method(self._inputs(call, self.logits_method))[0][:, -1].float() for call in calls]
        del method
        if self.head_method is None:
            return [values.argmax(-1) for values in logits], logits, None
        return self._tokens(calls), logits, None

    def _tokens(self, calls: Sequence[_Call]) -> list[torch.Tensor]:
        method = load(self.path, self.head_method)
        return [method(self._inputs(call, self.head_method))[0] for call in calls]

    def _run_with_logits(self, calls: Sequence[_Call]) -> tuple[list, list | None, str | None]:
        """The same as `run`, for a program that returns only tokens. A copy of the program also returns the logits."""
        copy = self.path.with_suffix(".logits")
        try:
            edge = self.program.exported_program(self.head_method)
            method = NodeOutput(self.path, self.head_method, edge, "mlx.sample.default", copy)
            results = [method(self._inputs(call, self.head_method)) for call in calls]
            again = _from_the_start(calls)
            expected = [method(self._inputs(call, self.head_method))[0] for call in again]
        except CannotLocate as reason:
            return self._tokens(calls), None, str(reason)
        finally:
            copy.unlink(missing_ok=True)
        del method
        tokens = [tokens for tokens, _ in results]
        # A few calls suffice to see that the file itself draws the same tokens as its copy. If it does not, -1 in place
        # of every token makes the check fail.
        same = all(torch.equal(a, b) for a, b in zip(self._tokens(again), expected, strict=True))
        return tokens if same else [t.fill_(-1) for t in tokens], [values.float() for _, values in results], None

    def departure(self, calls: Sequence[_Call]) -> str:
        """Returns the first departure as text, or the reason why none is named."""
        method = self.logits_method or self.head_method
        inputs = [self._inputs(call, method) for call in calls]
        try:
            return str(locate_in_file(self.path, method, self.program.exported_program(method), inputs))
        except CannotLocate as reason:
            return f"the intermediate values cannot be compared: {reason}"

    def _inputs(self, call: _Call, method: str) -> list[torch.Tensor]:
        inputs = [call.tokens, torch.tensor([call.position])]
        if self.decoder.batch > 1:
            inputs.append(torch.tensor(call.start))
        if method == self.head_method:  # every sampling parameter has its off value, so the draw is greedy
            vocab_size = self.decoder.model.config.get_text_config().vocab_size
            inputs += self.head.inputs(self.decoder.batch, vocab_size).values()
        return inputs
