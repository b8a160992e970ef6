"""The methods of a language model's program: a decoder, with or without the sampling head."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace

import torch
from torch._dynamo.exc import UserError
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...collector import paused_collector
from ...custom_kernel_ops.logprobs import token_logprobs, top_logprobs
from ...workarounds.repeated_layers import Unrepeatable, expand, trace_repeated
from ..export_options import HeadConfig
from ..sampling_head import adjust_logits, sample_logits
from ..sampling_parameters import INPUTS, PROCESSOR_INPUTS
from .adapters import AdapterSlots
from .decoder import CachedDecoder
from .history import TokenHistory, last_positions
from .quantization.tuning import decoder_layers
from .recurrent.rewind import LENGTH

ADAPTED = "adapted"  # the end of the names of methods for calls with adapters
LOAD_ADAPTER = "load_adapter"  # the method that writes a slot
TEXT_DECODER = "text_decoder"  # the method for embeddings, under ExecuTorch's name
# Values of the input `logprobs` of `verify`: it returns the log probabilities of the targets, or of the drawn tokens.
OF_TARGETS, OF_DRAWN = 1, 2


@dataclass(frozen=True)
class MethodKind:
    """What a method computes.

    - `form`: `chunk` takes consecutive tokens of one row and returns the result for the last one. `verify` takes
      such tokens too, and returns the results for all of them. `decode` takes one token of each of several rows and
      returns the results for all rows. `draft` is like `chunk`, but returns the result of the head for multi-token
      prediction. `rewind` takes the tokens of the last call of `verify` that are kept, and returns the next position.
    - `returns_tokens`: whether the method returns tokens. If False, it returns logits.
    - `width`: the number of rows of a call. It is 1 unless the form is `decode`.
    - `is_adapted`: whether each row has an adapter, which may be none.
    - `is_embedded`: whether the method takes embeddings in place of tokens.
    """

    form: str
    returns_tokens: bool
    width: int = 1
    is_adapted: bool = False
    is_embedded: bool = False


def method_kinds(
    outputs: str,
    rows: int,
    verify: bool,
    draft: bool,
    rewind: bool = False,
    adapters: bool = False,
    pictures: bool = False,
    portable: bool = False,
) -> dict[str, MethodKind]:
    """Return the methods of a program by name. `outputs` is that of `ExportOptions`.

    `verify`, `draft` and `rewind` say whether a program that returns tokens has the methods of these names. It can have
    `draft` and `rewind` only if it has `verify`. With `adapters`, each method that runs the layers of the model has a
    twin for calls with adapters, so that calls without one cost nothing more. With `pictures`, prompts may be given as
    embeddings. A `portable` program has one method over the caches: with pictures, it takes embeddings only.
    """
    kinds = {} if pictures and portable else _plain_kinds(outputs, rows, verify, draft, rewind)
    if pictures:
        kinds[TEXT_DECODER] = MethodKind("chunk", outputs == "tokens", is_embedded=True)
        if outputs == "both":
            kinds[f"{TEXT_DECODER}_sample"] = MethodKind("chunk", True, is_embedded=True)
    adapted = {name: kind for name, kind in kinds.items() if kind.form not in ("draft", "rewind")} if adapters else {}
    return kinds | {f"{name}_{ADAPTED}": replace(kind, is_adapted=True) for name, kind in adapted.items()}


def _plain_kinds(outputs: str, rows: int, verify: bool, draft: bool, rewind: bool) -> dict[str, MethodKind]:
    draws, speculative = outputs != "logits", {}
    if draws and verify:
        speculative["verify"] = MethodKind("verify", True)
        speculative |= {"draft": MethodKind("draft", True)} if draft else {}
        speculative |= {"rewind": MethodKind("rewind", False)} if rewind else {}
    if rows > 1:
        kinds = {"prefill": MethodKind("chunk", draws), "decode": MethodKind("decode", draws, rows)}
        kinds |= {f"decode_{width}": MethodKind("decode", draws, width) for width in _decode_widths(rows)}
        kinds |= speculative
        return kinds | ({"logits": MethodKind("chunk", False)} if outputs == "both" else {})
    kinds = {"forward": MethodKind("chunk", outputs == "tokens")}
    return kinds | ({"sample": MethodKind("chunk", True)} if outputs == "both" else {}) | speculative


def _decode_widths(rows: int) -> list[int]:
    """Return the widths of the methods for decoding fewer than all rows: the powers of two from 2 to `rows` - 1."""
    return [1 << i for i in range(1, (rows - 1).bit_length())]


@paused_collector()
def export_methods(
    decoder: CachedDecoder, kinds: dict[str, MethodKind], head: HeadConfig
) -> dict[str, torch.export.ExportedProgram]:
    """Export the methods `kinds`. Returns the exported programs by name of the method."""
    history = TokenHistory(decoder.rows, decoder.max_context_len, head.penalties) if head.penalties else None
    methods = {name: _export(_Method(decoder, history, kind, head.logprobs), head) for name, kind in kinds.items()}
    if decoder.adapters is not None:
        methods[LOAD_ADAPTER] = _export_load_adapter(decoder.adapters)
    return methods


def example_inputs(kind: MethodKind, decoder: CachedDecoder, head: HeadConfig, length: int) -> dict[str, torch.Tensor]:
    """Return inputs of a method by name, in their order, with `length` tokens. All parameters have their off values."""
    rows = kind.width
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    if kind.is_embedded:
        embeddings = torch.zeros(1, length, decoder.embedding_width)
    inputs = {"tokens": embeddings if kind.is_embedded else tokens, "input_pos": torch.zeros(rows, dtype=torch.int64)}
    if decoder.rows > 1:
        inputs["row"] = torch.arange(rows)
    if kind.form == "draft":
        inputs["row_length"] = torch.zeros(1, dtype=torch.int64)
    if kind.is_adapted:
        inputs["adapter"] = torch.zeros(rows, dtype=torch.int64)
    if kind.is_embedded and head.penalties:
        inputs["ids"] = tokens
    if decoder.has_rope_offset:
        inputs["rope"] = torch.zeros((3, length) if kind.is_embedded else rows, dtype=torch.int64)
    if kind.returns_tokens:
        vocab_size = decoder.model.config.get_text_config().vocab_size
        inputs |= head.inputs(length if kind.form == "verify" else rows, vocab_size, per_row=kind.form == "decode")
        if head.logits_processors():
            inputs["adjusts"] = torch.tensor(True)
        if kind.form == "verify" and head.logprobs:
            inputs["targets"] = torch.zeros(1, length, dtype=torch.int64)
    return inputs


class _Method(torch.nn.Module):
    """One method of the program.

    Every method has the same module structure, because ExecuTorch shares weights, caches and history
    between methods by the names of the parameters and buffers.
    """

    def __init__(self, decoder: CachedDecoder, history: TokenHistory | None, kind: MethodKind, num_logprobs: int):
        super().__init__()
        self.decoder, self.history, self.kind, self.num_logprobs = decoder, history, kind, num_logprobs

    def forward(
        self,
        tokens,
        input_pos,
        row=None,
        row_length=None,
        adapter=None,
        ids=None,
        rope=None,
        logprobs=None,
        adjusts=None,
        targets=None,
        **parameters,
    ):
        form = self.kind.form
        if form == "rewind":
            return self.decoder.rewind(tokens, input_pos, row)
        if form == "decode":
            tokens = tokens.reshape(1, -1)
        if form == "draft":
            logits = self.decoder.mtp(tokens, input_pos, row, row_length)
            input_pos = input_pos + 1  # that of the first token; in a call of `draft`, it was that of its hidden state
        else:
            keep_log = form == "verify" and self.decoder.can_rewind
            logits = self.decoder(
                tokens,
                input_pos,
                row,
                adapter,
                rope,
                all_positions=form != "chunk",
                keep_log=keep_log,
                is_picture=self.kind.is_embedded,
            )
        # A method that returns logits also updates the history: the next call may be of a method that draws a token
        # and needs the whole history.
        written = None if self.history is None else self.history.write(tokens if ids is None else ids, input_pos, row)
        if not self.kind.returns_tokens:
            return logits.transpose(0, 1) if form == "decode" else logits
        logits = logits[:, -1] if form in ("chunk", "draft") else logits[0]
        if form == "verify" and parameters.get("seed") is not None:
            parameters["seed"] = parameters["seed"] + torch.arange(tokens.shape[1])
        processed = {name: parameters.pop(name) for name in PROCESSOR_INPUTS if name in parameters}
        if self.history is not None:
            length = tokens.shape[1]
            last = input_pos + torch.arange(length) if form == "verify" else last_positions(length, input_pos)
            processed |= {"history": written, "last": last} | ({} if row is None else {"row": row})
        adjusted = logits if adjusts is None else self._adjust(logits, adjusts, processed)
        drawn = sample_logits(adjusted, **parameters)
        if not self.num_logprobs:
            return drawn.unsqueeze(0) if form == "verify" else drawn
        if form != "verify":
            return drawn, token_logprobs(logits, drawn, logprobs), *top_logprobs(logits, logprobs, self.num_logprobs)
        of_targets, of_drawn = ((logprobs == value).to(torch.int64) for value in (OF_TARGETS, OF_DRAWN))
        results = (
            drawn,
            token_logprobs(logits, targets[0], of_targets),
            token_logprobs(logits, drawn, of_drawn),
            *top_logprobs(logits, of_drawn, self.num_logprobs),
        )
        return tuple(result.unsqueeze(0) for result in results)

    def _adjust(self, logits, adjusts, processed):
        """Apply the logits processors if `adjusts`, bool, is true. Otherwise, the call spends no time on them."""

        def apply(logits, *values):
            given = dict(zip(processed, values))
            if self.history is not None:
                written, last = given.pop("history"), given.pop("last")
                given["history"], given["history_valid"] = self.history.read(written, last, given.pop("row", None))
            return [adjust_logits(logits, **given)]

        def keep(logits, *_):
            return [logits.to(torch.float32, copy=True)]  # a branch must not return its operand

        operands = (logits, *processed.values())
        return torch.ops.higher_order.cond(adjusts, apply, keep, operands)[0]


# torch.export looks up the names in dynamic_shapes in the signature of `forward`. It would not find the names of
# sampling parameters, which are passed in **parameters. The signature is therefore set explicitly.
_ARGUMENTS = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", "tokens", "input_pos")]
_ARGUMENTS += [
    inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
    for n in ("row", "row_length", "adapter", "ids", "rope", *INPUTS, "logprobs", "adjusts", "targets")
]
_Method.forward.__signature__ = inspect.Signature(_ARGUMENTS)  # type: ignore[attr-defined]


class _LoadAdapter(torch.nn.Module):
    """Writes an adapter to a slot, and returns the slot."""

    def __init__(self, adapters: AdapterSlots):
        super().__init__()
        self.adapters = adapters

    def forward(self, slot, *weights):
        self.adapters.write(slot, weights)
        return slot + 0


def _export_load_adapter(adapters: AdapterSlots) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(
            _LoadAdapter(adapters), (torch.ones(1, dtype=torch.int64), *adapters.example_weights())
        )


def _max_length(kind: MethodKind, decoder: CachedDecoder, head: HeadConfig) -> int:
    """Return the largest number of tokens of a call. The method `verify` may also score tokens, in whole chunks."""
    is_limited = kind.form == "rewind" or kind.form == "verify" and decoder.can_rewind and not head.logprobs
    return min(decoder.chunk, LENGTH) if is_limited else decoder.chunk


def _export(method: _Method, head: HeadConfig, *, repeat: bool = True) -> torch.export.ExportedProgram:
    """Export a method. With `repeat`, equal decoder layers are traced once if possible, which is much faster."""
    decoder, kind = method.decoder, method.kind
    is_decode = kind.form == "decode"
    # torch.export would treat a sequence of length 1 as fixed. The example of a dynamic sequence has 2 tokens.
    inputs = example_inputs(kind, decoder, head, 1 if is_decode else 2)
    shapes = dict.fromkeys(inputs)
    if not is_decode:
        sequence = torch.export.Dim("sequence", min=1, max=_max_length(kind, decoder, head))
        shapes |= {name: {1: sequence} for name in ("tokens", "ids") if name in inputs}
        if kind.is_embedded and "rope" in inputs:
            shapes["rope"] = {1: sequence}
        if kind.form == "verify":
            axes = {"allowed_tokens": 0, "targets": 1}
            shapes |= {name: {axis: sequence} for name, axis in axes.items() if name in inputs}
    args = inputs.pop("tokens"), inputs.pop("input_pos")
    try:
        with torch.no_grad():
            return _trace(method, args, inputs, shapes, repeat)
    except (UserError, NotImplementedError, RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"export_llm: model: {type(decoder.model).__name__}: torch.export cannot trace it: {reason}"
        ) from error


def _trace(method: _Method, args: tuple, inputs: dict, shapes: dict, repeat: bool) -> torch.export.ExportedProgram:
    """Return what `torch.export.export` returns."""
    export = functools.partial(torch.export.export, method, args, inputs, dynamic_shapes=shapes)
    # The Python objects of states refer to tensors of the layer. Operators know no subclasses of tensors, such as
    # torchao's quantized weights.
    if repeat and not method.decoder.has_state and not any(map(is_traceable_wrapper_subclass, method.parameters())):
        try:
            with trace_repeated(method, (layer for _, layer in decoder_layers(method.decoder.model))):
                program = export()
            expand(program)
            return program
        except Unrepeatable:
            pass
    return export()
