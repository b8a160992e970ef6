"""The self-check of an export: runs the finished file and the eager model on a short prompt and compares them."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from executorch.exir import ExecutorchProgramManager

from ...verification.cost import Cost
from ...verification.load import load, load_methods
from ...verification.locate import CannotLocate, locate_in_file
from ...verification.node_output import NodeOutput
from ...verification.noise import RoundingNoise
from ...verification.rounding import Comparison, agree, compare
from ..export_options import HeadConfig
from .attention.cached import use_cached_attention
from .decoder import CachedDecoder
from .embeddings import embeddings
from .methods import LOAD_ADAPTER, MethodKind, example_inputs

_SEED = 20
_DECODE_STEPS = 3
_NOISY_CALL = 1  # the index of the call that also runs with rounding noise: it has the second chunk
_MAX_FIRST_CHUNK = 512  # the largest first chunk of the prompt: eager torch takes long for more tokens
_SECOND_CHUNK = 8  # tokens of the prompt in the second chunk
_VERIFY_TOKENS = 4  # tokens of a call of the method verify
_SLOT = 1  # of the adapter in calls with adapters
_ADAPTER_SIZE = 0.3  # of the random numbers of its weights, about
# The number of tokens of each call that locates a departure: few, because these calls keep all intermediate values.
_LOCATE_LENGTHS = (8, 4, 1)


class VerificationError(RuntimeError):
    """The exported program differs from the eager model by more than rounding. `check` has the numbers, as text too."""

    def __init__(self, check: Any):
        super().__init__(f"verify: the program differs from the eager model beyond rounding: {check}")
        self.check = check


@dataclass(frozen=True)
class ProgramCheck:
    """The result of the check of an exported language model or speech model.

    - `tokens`: the number of greedy tokens that were compared.
    - `agreeing`: the number of those tokens that agree: in the eager model, the token has the largest logit, or a logit
      that equals the largest one within rounding.
    - `compared`: what was compared in addition to the tokens: the logits, or the encoder states of a speech model.
    - `difference`, `tolerance`: the largest absolute difference of these values, and the tolerance, in the call where
      the values exceed their tolerance the most or come closest to it. None if they were not compared; `note` then
      says why.
    - `values_ok`: whether these values agree within rounding, or were not compared.
    - `departure`: if the program differs, the first instruction whose value differs from eager torch by more than
      rounding, as text, or the reason why none is named. Otherwise None.
    - `seconds`: the time of the check.
    - `peak_before`: the peak memory of the process before the check, which is the peak of the export, in bytes.
    - `added_memory`: by how many bytes the check raised this peak. 0 if the memory of the process during the check,
      which includes the model and the program, stayed below the peak of the export.
    """

    tokens: int
    agreeing: int
    difference: float | None
    tolerance: float | None
    values_ok: bool
    note: str | None
    departure: str | None
    seconds: float
    added_memory: int
    peak_before: int
    compared: str = "logits"

    @property
    def ok(self) -> bool:
        return self.values_ok and self.agreeing == self.tokens

    def __str__(self) -> str:
        parts = [f"{self.agreeing} of {self.tokens} greedy tokens agree"]
        if self.difference is None:
            parts.append(f"{self.compared} not compared: {self.note}")
        else:
            difference = f"largest difference of the {self.compared} {self.difference:.1e}"
            parts.append(f"{difference}, tolerance {self.tolerance:.1e}")
        return "; ".join(parts) + (f"\n{self.departure}" if self.departure else "")

    def cost(self) -> str:
        """Return a line for the user: the time of the check and the memory that it added to the peak of the export."""
        added, share = self.added_memory / 1e9, self.added_memory / self.peak_before
        return (
            f"verify: {self.seconds:.1f} s; peak memory of the export {self.peak_before / 1e9:.2f} GB, the check added "
            f"{added:.2f} GB ({share:.0%})"
        )


def check_program(
    path: Path,
    program: ExecutorchProgramManager,
    decoder: CachedDecoder,
    kinds: dict[str, MethodKind],
    head: HeadConfig,
) -> ProgramCheck:
    """Run the file `path` and `decoder`, the module that was exported, and compare their logits and greedy tokens.

    The check consists of two runs. The first run calls the method for chunks with a prompt and then with a few single
    tokens. It passes the prompt in two calls. If the context permits it, the first call has a whole chunk, but at most
    512 tokens. The second run calls the methods for chunks, for decoding and for verification, as far as the program
    has them, with short prompts in one or two rows. After the verification, the row is rewound if the program has
    `rewind`, and gets another token. If some methods return tokens, it calls these methods and compares only tokens.
    `decoder` and the file get the same tokens: random ones in prompts and for verification, and the greedy
    tokens of `decoder` after a prompt.
    """
    cost = Cost()
    steps = _first_run(decoder), _second_run(decoder, kinds), _adapted_run(decoder, kinds)
    calls = _eager_calls(decoder, steps[0], noisy_calls={min(_NOISY_CALL, len(steps[0]) - 1)})
    noise = calls[0].noisy[0] - calls[0].logits
    others = [*_eager_calls(decoder, steps[1]), *_eager_calls(decoder, steps[2])]
    runtime = _Runtime(path, program, decoder, kinds, head)
    tokens, logits, note = runtime.run(calls)
    other_tokens, other_logits = runtime.run_several_methods(others)
    others = [replace(call, noisy=[call.logits + noise]) for call in others if call.form != "rewind"]
    results = tokens + other_tokens, (logits or [None] * len(calls)) + other_logits
    outcome = _compared(*results, calls + others)
    if outcome.wrong is not None:  # noise may change the logits of other calls more
        noisy = [call for run in steps for call in _eager_calls(decoder, run, noisy_calls=range(len(run)))]
        outcome = _compared(*results, [call for call in noisy if call.form != "rewind"])
    worst, wrong = outcome.worst, outcome.wrong
    return ProgramCheck(
        tokens=sum(a.numel() for a in outcome.matches),
        agreeing=sum(int(a.sum()) for a in outcome.matches),
        difference=None if worst is None else worst.difference,
        tolerance=None if worst is None else worst.tolerance,
        values_ok=worst is None or worst.ok,
        note=note,
        departure=None if wrong is None else runtime.departure(wrong.form, wrong.width),
        seconds=cost.seconds,
        added_memory=cost.added_memory,
        peak_before=cost.peak_before,
    )


@dataclass(frozen=True)
class _Outcome:
    """Whether each token of each call agrees, the worst comparison of logits, and a call that is wrong, or None."""

    matches: list[torch.Tensor]
    worst: Comparison | None
    wrong: _Call | None


def _compared(
    tokens: Sequence[torch.Tensor], logits: Sequence[torch.Tensor | None], calls: Sequence[_Call]
) -> _Outcome:
    """Compare the tokens and logits of the file with the eager `calls`. Logits that are None are left out."""
    matches = [agree(t, call.logits, call.noisy) for t, call in zip(tokens, calls, strict=True)]
    pairs = [(a, call) for a, call in zip(logits, calls, strict=True) if a is not None]
    comparisons = [compare(a, call.logits, call.noisy) for a, call in pairs]
    worst = max(comparisons, key=lambda comparison: comparison.excess, default=None)
    wrong = next((call for a, call in zip(matches, calls) if not a.all()), None)
    if wrong is None and worst is not None and not worst.ok:
        wrong = pairs[comparisons.index(worst)][1]
    return _Outcome(matches, worst, wrong)


@dataclass(frozen=True)
class _Step:
    """The tokens of one call: `length` tokens of a single row. If the form is "decode", one token of each of `rows`.

    `MethodKind` explains `form`. With `is_adapted`, all rows have the adapter in slot `_SLOT`.
    """

    form: str
    length: int
    rows: tuple[int, ...]
    is_adapted: bool = False


@dataclass
class _Call:
    """The inputs of a call, and the logits `[B, V]` of the eager model.

    `noisy` has these logits plus the changes that rounding noise causes, or is empty if no call ran with noise. A call
    of the form "rewind" has no logits.
    """

    form: str
    inputs: list[torch.Tensor]  # tokens, input_pos and, if there are several rows, row
    logits: torch.Tensor | None
    noisy: list[torch.Tensor]
    is_adapted: bool = False

    @property
    def width(self) -> int:
        """The number of rows."""
        return len(self.inputs[0])


def _first_run(decoder: CachedDecoder) -> list[_Step]:
    """Return the steps of a prompt in two chunks and of single tokens, all in the last row."""
    steps = min(_DECODE_STEPS, decoder.max_context_len - 2)
    chunk = min(decoder.chunk, _MAX_FIRST_CHUNK)
    second = min(decoder.chunk, _SECOND_CHUNK)
    prompt = min(chunk + second, decoder.max_context_len - steps)
    first = min(chunk, max(1, prompt - second))
    lengths = [length for length in (first, prompt - first) if length] + [1] * steps
    return [_Step("chunk", length, (decoder.rows - 1,)) for length in lengths]


def _second_run(decoder: CachedDecoder, kinds: dict[str, MethodKind]) -> list[_Step]:
    """Return the steps of short prompts in the last and the first row, in the forms chunk, decode and verify.

    Returns none if the first run calls the only method that this run would call.
    """
    last, forms = decoder.rows - 1, {kind.form for kind in kinds.values()}
    if not any(kind.returns_tokens for kind in kinds.values()) and "decode" not in forms:
        return []
    steps = [_Step("chunk", length, (last,)) for length in (5, 1)]
    widths = sorted(kind.width for kind in kinds.values() if kind.form == "decode" and not kind.is_adapted)
    if widths:
        # The last row and the first row. The unused indices repeat the last row.
        row_indices = (last, 0, *[last] * (decoder.rows - 2))
        counts = [_DECODE_STEPS if width == decoder.rows else 1 for width in widths]
        decodes = [[_Step("decode", 1, row_indices[:width])] * n for width, n in zip(widths, counts, strict=True)]
        steps += [_Step("chunk", 3, (0,)), *itertools.chain.from_iterable(decodes)]
    if "verify" in forms:
        steps.append(_Step("verify", _VERIFY_TOKENS, (last,)))
    if "rewind" in forms:
        steps += [_Step("rewind", 1, (last,)), _Step("chunk", 1, (last,))]
    return _fitting(steps, decoder)


def _adapted_run(decoder: CachedDecoder, kinds: dict[str, MethodKind]) -> list[_Step]:
    """Return steps with an adapter, or none if the program takes no adapters."""
    if decoder.adapters is None:
        return []
    steps = _second_run(decoder, kinds) or [_Step("chunk", length, (decoder.rows - 1,)) for length in (5, 1)]
    end = next((i for i, step in enumerate(steps) if step.form == "rewind"), len(steps))
    return [replace(step, is_adapted=True) for step in steps[:end]]


def _fitting(steps: Sequence[_Step], decoder: CachedDecoder) -> list[_Step]:
    """Return `steps`, shortened so that each fits into a chunk and all together fit into the context."""
    fitting: list[_Step] = []
    held = dict.fromkeys(range(decoder.rows), 0)
    for step in steps:
        length = min(step.length, decoder.chunk, decoder.max_context_len - max(held[row] for row in step.rows))
        if step.form == "rewind":
            if not fitting or fitting[-1].form != "verify":
                continue
            held[step.rows[0]] -= fitting[-1].length
            length = step.length
        if length:
            fitting.append(replace(step, length=length))
            held |= {row: held[row] + length for row in step.rows}
    return fitting


def _eager_calls(decoder: CachedDecoder, steps: Sequence[_Step], noisy_calls: Container[int] = ()) -> list[_Call]:
    """Run the eager model in one call for each of `steps`, and return the calls.

    The tokens are random. There is one exception: a call with one token of a row takes the greedy token of the last
    call of that row. The calls with the indices `noisy_calls` also run with rounding noise. The changes of their logits
    are added to the logits of every call to get `noisy`. The noise does not affect later calls, because the caches are
    restored.
    """
    if not steps:
        return []
    generator = torch.Generator().manual_seed(_SEED)
    used = sorted({row for step in steps for row in step.rows})
    eager = _small_decoder(decoder, steps, len(used))
    vocab_size = decoder.model.config.get_text_config().vocab_size
    held, greedy = dict.fromkeys(range(decoder.rows), 0), {}
    if any(step.is_adapted for step in steps):
        eager.adapters.write(torch.tensor([_SLOT]), _adapter_weights(decoder))
    calls: list[_Call] = []
    changes: list[torch.Tensor] = []  # what noise adds to the logits of the last token, for each noisy call
    for number, step in enumerate(steps):
        tokens = torch.randint(vocab_size, (len(step.rows), step.length), generator=generator)
        if step.length == 1 and step.form != "verify" and set(step.rows) <= set(greedy):
            tokens = torch.tensor([[greedy[row]] for row in step.rows])
        inputs = [tokens, torch.tensor([held[row] for row in step.rows])]
        eager_inputs = list(inputs)
        if decoder.rows > 1:
            inputs.append(torch.tensor(step.rows))
        if eager.rows > 1:
            eager_inputs.append(torch.tensor([used.index(row) for row in step.rows]))
        if step.form == "rewind":
            (row,), last = step.rows, calls[-1].inputs
            inputs[:2] = last[0][:, : step.length], last[1]
            held[row] = eager.rewind(*inputs[:2], *eager_inputs[2:]).item()
            calls.append(_Call(step.form, inputs, None, []))
            continue
        if eager.adapters is not None:
            eager_inputs += [] if eager.rows > 1 else [None]
            eager_inputs.append(torch.full((len(step.rows),), _SLOT) if step.is_adapted else None)
        noisy = None
        if number in noisy_calls:
            held_state = {name: buffer.clone() for name, buffer in eager.named_buffers(recurse=False)}
            with RoundingNoise(number):
                noisy = _logits(eager, step.form, eager_inputs)
            for name, buffer in held_state.items():
                getattr(eager, name).copy_(buffer)
        logits = _logits(eager, step.form, eager_inputs)
        if noisy is not None:
            changes.append((noisy - logits)[-1:])
        calls.append(_Call(step.form, inputs, logits, [], step.is_adapted))
        held |= {row: held[row] + step.length for row in step.rows}
        best = logits.argmax(-1).tolist()
        greedy |= dict(zip(step.rows, best)) if step.form == "decode" else {step.rows[0]: best[-1]}
    if any(step.is_adapted for step in steps):
        eager.adapters.write(torch.tensor([_SLOT]), eager.adapters.example_weights())
    use_cached_attention(decoder.model, decoder.cache)  # in place of the small caches, which are freed
    for call in calls:
        call.noisy = [] if call.logits is None else [call.logits + change for change in changes]
    return calls


def _small_decoder(decoder: CachedDecoder, steps: Sequence[_Step], rows: int) -> CachedDecoder:
    """Return a decoder with the same model, whose caches only have room for `steps`. This saves memory."""
    count = sum(step.length for step in steps)
    return CachedDecoder(
        decoder.model,
        rows=rows,
        max_context_len=count,
        chunk=decoder.chunk,
        specs=decoder.specs,
        logs_states=decoder.can_rewind,
        adapters=decoder.adapters,
    ).eval()


def _adapter_weights(decoder: CachedDecoder) -> list[torch.Tensor]:
    """Return random weights of an adapter, as `AdapterSlots.write` takes them. They change the logits a little."""
    generator = torch.Generator().manual_seed(_SEED)
    examples = decoder.adapters.example_weights()
    return [torch.randn(w.shape, generator=generator) * _ADAPTER_SIZE / w.shape[1] ** 0.5 for w in examples]


def _logits(decoder: CachedDecoder, form: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the logits `[B, V]` of a call, float32."""
    tokens, *places = inputs
    with torch.no_grad():
        keep_log = form == "verify" and decoder.can_rewind
        return decoder(tokens.reshape(1, -1), *places, all_positions=form != "chunk", keep_log=keep_log)[0].float()


class _Runtime:
    """The finished file in the runtime."""

    def __init__(self, path, program, decoder, kinds: dict[str, MethodKind], head: HeadConfig):
        self.path, self.program, self.decoder, self.kinds, self.head = path, program, decoder, kinds, head

    def run(self, calls: Sequence[_Call]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, str | None]:
        """Run `calls`, all of the form "chunk". Returns their greedy tokens `[B]`, their logits `[B, V]`, and None.

        If the logits cannot be read, returns the tokens, None and the reason.
        """
        name = self._method("chunk", returns_tokens=False)
        if name is None:
            return self._run_with_logits(self._method("chunk", returns_tokens=True), calls)
        method = load(self.path, name)
        logits = [method(self._inputs(call, name))[0][:, -1].float() for call in calls]
        return [values.argmax(-1) for values in logits], logits, None

    def _run_with_logits(self, name: str, calls: Sequence[_Call]) -> tuple[list, list | None, str | None]:
        """Do what `run` does, for a method that returns only tokens.

        Runs a copy of the file, in which this method also returns the logits.
        """
        copy = self.path.with_suffix(".logits")
        try:
            edge = self.program.exported_program(name)
            with_logits = NodeOutput(self.path, name, edge, "mlx.sample.default", copy)
            results = [with_logits(self._inputs(call, name)) for call in calls]
        except CannotLocate as reason:
            method = load(self.path, name)
            return [method(self._inputs(call, name))[0] for call in calls], None, str(reason)
        finally:
            copy.unlink(missing_ok=True)
        return [values[0] for values in results], [values[-1].float() for values in results], None

    def run_several_methods(self, calls: Sequence[_Call]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Run `calls` of several methods, which share the caches. Returns their tokens `[B]` and their logits `[B, V]`.

        Calls of the form "rewind" have no results.
        If the program has methods that return tokens, calls only these methods. The logits are then None.
        """
        if not calls:
            return [], []
        returns_tokens = any(kind.returns_tokens for kind in self.kinds.values())
        names = [self._method(c.form, returns_tokens and c.form != "rewind", c.width, c.is_adapted) for c in calls]
        has_adapters = self.decoder.adapters is not None
        methods = load_methods(self.path, dict.fromkeys([*names, *([LOAD_ADAPTER] if has_adapters else [])]))
        if has_adapters:
            methods[LOAD_ADAPTER]([torch.tensor([_SLOT]), *_adapter_weights(self.decoder)])
        all_results = [methods[name](self._inputs(call, name))[0] for name, call in zip(names, calls, strict=True)]
        results = [result for result, call in zip(all_results, calls, strict=True) if call.form != "rewind"]
        if returns_tokens:
            return [tokens.reshape(-1) for tokens in results], [None] * len(results)
        logits = [values[:, -1].float() for values in results]
        return [values.argmax(-1) for values in logits], logits

    def _method(self, form: str, returns_tokens: bool, width: int = 1, is_adapted: bool = False) -> str | None:
        """Return the name of the first method of this kind, or None if there is none."""
        wanted = MethodKind(form, returns_tokens, width, is_adapted)
        # A portable program with pictures takes embeddings only.
        kinds = wanted, replace(wanted, is_embedded=True)
        return next((name for wanted in kinds for name, kind in self.kinds.items() if kind == wanted), None)

    def departure(self, form: str, width: int) -> str:
        """Return the first departure in a method of this form and width as text, or the reason why none is named."""
        name = self._method(form, False, width) or self._method(form, True, width)
        rows = tuple(range(width)) if form == "decode" else (self.decoder.rows - 1,)
        lengths = [1] * len(_LOCATE_LENGTHS) if form == "decode" else _LOCATE_LENGTHS
        steps = _fitting([_Step(form, length, rows) for length in lengths], self.decoder)
        inputs = [self._inputs(call, name) for call in _eager_calls(self.decoder, steps)]
        try:
            return str(locate_in_file(self.path, name, self.program.exported_program(name), inputs))
        except CannotLocate as reason:
            return f"the intermediate values cannot be compared: {reason}"

    def _inputs(self, call: _Call, name: str) -> list[torch.Tensor]:
        """Return the inputs of method `name`. Every sampling parameter has its off value, so the draw is greedy."""
        length = call.inputs[0].shape[1]
        inputs = example_inputs(self.kinds[name], self.decoder, self.head, length)
        if call.is_adapted:
            inputs["adapter"] = torch.full_like(inputs["adapter"], _SLOT)
        given = list(call.inputs)
        if self.kinds[name].is_embedded:
            given[0] = embeddings(self.decoder, call.inputs[0])
            if "ids" in inputs:
                inputs["ids"] = call.inputs[0]
            if "rope" in inputs:
                inputs["rope"] = (torch.arange(length) + call.inputs[1]).expand(3, -1).contiguous()
        return [*given, *list(inputs.values())[len(given) :]]
