"""A Hugging Face causal LM → a `.pte` that samples inside. docs/llm-program.md is its contract."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchProgramManager, to_edge_transform_and_lower
from transformers import AutoTokenizer, PreTrainedModel

from ..partitioner import MLXPartitioner, Report
from .decoder import CachedDecoder
from .history import TokenHistory
from .experts import use_gathered_experts
from .metadata import metadata
from .parameters import Sampling
from .quantize import is_microscaled, quantize_model
from .sampling import sample_logits
from .weights import cast_parameters, find_folder, load_causal_lm

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
QUANTIZATIONS = {"int4": 4, "int8": 8, "none": None}
OUTPUTS = ("head", "logits", "both")
POSITIONS = 4096  # of the caches, unless more are asked for: they are allocated as a whole
CHUNK = 512  # tokens of one call: more make the products no faster, and attention's scores larger


@dataclass(frozen=True)
class ExportedLLM:
    """What `export_llm` made. `report` says what was delegated."""

    program: ExecutorchProgramManager
    report: Report
    metadata: dict[str, Any]
    methods: tuple[str, ...]
    cache_bytes: int  # of keys and values, in memory
    unquantized: tuple[str, ...] = ()  # layers that `quantize` left, as no group divides their rows

    def save(self, path: str | Path) -> int:
        """Write the `.pte`; returns its size in bytes."""
        with open(path, "wb") as file:
            self.program.write_to_file(file)
            return file.tell()


def export_llm(
    model: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    adapter: str | Path | None = None,
    dtype: torch.dtype | None = None,
    quantize: str = "none",
    group_size: int = 64,
    max_seq_len: int | None = None,
    chunk: int = CHUNK,
    sliding_window: str | int = "auto",
    batch: int = 1,
    outputs: str = "head",
    sampling: Sampling = Sampling(),
    portable: bool = True,
    progress: Any = lambda step: None,
) -> ExportedLLM:
    """Export `model`, a Hugging Face folder, a hub id or a loaded model, for MLX.

    A model that is handed over is used up: its attention, and with `quantize` its weights,
    are replaced. A folder may hold weights that MLX has quantized, and a model linear layers with
    NVFP4 or MX weights of torchao's; they stay as they are.

    - `adapter`: a folder of `peft`'s with a LoRA adapter, merged into the weights.
    - `dtype` of the weights and the arithmetic, by default float32 or that of `model`.
    - `quantize`: the weights of linear layers and embeddings to `int4` or `int8`, in groups of
      `group_size` (32, 64 or 128).
    - `max_seq_len`: how many positions the caches hold, by default all of the model's up to 4096.
    - `chunk`: how many tokens one call takes; runners feed longer prompts in pieces.
    - `sliding_window`: `auto`, by the model's config; else the window of every layer, 0 for none.
    - `batch`: how many sequences run side by side.
    - `outputs`: `head`, a program that returns tokens; `logits`; or `both`, as two methods.
    - `sampling`: which parameters the head takes.
    - `portable`: use only nodes that ExecuTorch's own MLX delegate has, so that it runs the file.
    - `progress` is called with the name of each long step before it begins.

    Raises ValueError naming the argument that is out of its range.
    """
    _check("quantize", quantize, QUANTIZATIONS)
    _check("outputs", outputs, OUTPUTS)
    _check("group_size", group_size, (32, 64, 128))
    for name, value, least in (("batch", batch, 1), ("chunk", chunk, 2)):
        if value < least:
            raise ValueError(f"export_llm: {name} is {value}, expected at least {least}")
    if outputs == "logits" and (asked := sampling.adjusts()):
        raise ValueError(
            f"export_llm: sampling.{asked} is a parameter of the head, and outputs is logits; expected "
            "head or both, or to leave it off: the host honours it without"
        )
    if sliding_window != "auto" and not (isinstance(sliding_window, int) and sliding_window >= 0):
        raise ValueError(f"export_llm: sliding_window is {sliding_window}, expected 'auto' or a length")
    progress("load")
    if not isinstance(model, PreTrainedModel):
        try:
            folder = find_folder(model)
        except ValueError as error:
            raise ValueError(f"export_llm: model {error}") from error
        tokenizer = tokenizer or _tokenizer(folder)
        model, dtype = load_causal_lm(folder), dtype or torch.float32
    model = model.eval().requires_grad_(False)
    if adapter is not None:
        progress("merge the adapter")
        cast_parameters(model, dtype or model.dtype)
        model = merge_adapter(model, adapter)
    if is_microscaled(model):
        from .microscaled import use_packed_weights  # which takes prototypes of torchao's

        use_packed_weights(model)
    unquantized: list[str] = []
    if QUANTIZATIONS[quantize]:
        progress(f"quantize to {quantize}")
        unquantized = quantize_model(model, QUANTIZATIONS[quantize], group_size, dtype=dtype)
    if dtype is not None:
        cast_parameters(model, dtype)
    config = model.config.get_text_config()
    max_seq_len = _max_seq_len(config, max_seq_len)
    if sampling.penalties > max_seq_len:
        raise ValueError(
            f"export_llm: sampling.penalties is {sampling.penalties}, expected at most {max_seq_len}"
        )
    use_gathered_experts(model)
    chunk = min(chunk, max_seq_len)
    decoder = CachedDecoder(
        model, batch=batch, max_seq_len=max_seq_len, chunk=chunk, window=sliding_window
    )
    progress("export")
    sampling = Sampling.none() if outputs == "logits" else sampling
    history = TokenHistory(batch, max_seq_len, sampling.penalties) if sampling.penalties else None
    methods = {}
    for name, draws in _methods(outputs).items():
        inputs = sampling.inputs(batch, config.vocab_size) if draws else {}
        method = _Method(decoder, history, draws)
        methods[name] = _export(method, chunk, inputs)
    constants = metadata(model, tokenizer, decoder, chunk, sampling, head=outputs != "logits")
    progress("lower")
    partitioner = MLXPartitioner(own_nodes=not portable)
    lowered = to_edge_transform_and_lower(
        methods,
        partitioner={name: [partitioner] for name in methods},
        constant_methods=constants,
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    progress("serialize")
    return ExportedLLM(
        lowered.to_executorch(),
        partitioner.explain(),
        constants,
        tuple(methods),
        decoder.cache.bytes,
        tuple(unquantized),
    )


def merge_adapter(model: PreTrainedModel, folder: str | Path) -> PreTrainedModel:
    """`model` with the LoRA adapter in `folder` added to its weights."""
    if not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(f"export_llm: adapter is {folder}, which has no adapter_config.json")
    from peft import PeftModel

    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:  # other shapes, other layers
        raise ValueError(f"export_llm: adapter {folder} does not fit a {type(model).__name__}: {error}") from error
    if not hasattr(adapted, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(f"export_llm: adapter {folder} is of kind {kind}, expected one to merge, such as LORA")
    return adapted.merge_and_unload()


class _Method(torch.nn.Module):
    """A method of the program.

    All methods have the names of weights, caches and history in common: that is what makes
    them share these.
    """

    def __init__(self, decoder: CachedDecoder, history: TokenHistory | None, draws: bool):
        super().__init__()
        self.decoder, self.history, self.draws = decoder, history, draws

    def forward(
        self, tokens, input_pos, start=None, temperature=None, top_p=None, seed=None, top_k=None,
        min_p=None, repetition_penalty=None, presence_penalty=None, frequency_penalty=None,
        bias_tokens=None, bias_values=None, allowed_tokens=None,
    ):  # fmt: skip
        logits = self.decoder(tokens, input_pos, start)
        seen = {}
        if self.history is not None:  # also for logits: another method may look at it later
            seen = dict(zip(("history", "history_valid"), self.history.update(tokens, input_pos, start)))
        if not self.draws:
            return logits
        return sample_logits(
            logits[:, -1],
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            bias_tokens=bias_tokens,
            bias_values=bias_values,
            allowed_tokens=allowed_tokens,
            **seen,
        )


def _methods(outputs: str) -> dict[str, bool]:
    """The methods of a program, and which of them draw a token."""
    return {"forward": outputs == "head"} | ({"sample": True} if outputs == "both" else {})


def _export(method: _Method, chunk: int, parameters: dict) -> torch.export.ExportedProgram:
    batch = method.decoder.batch
    tokens, position = torch.zeros(batch, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    # By name, so that the inputs of the program have those; it takes them in this order.
    named = {"start": torch.zeros(batch, dtype=torch.int64)} if batch > 1 else {}
    named |= parameters
    shapes = {"tokens": {1: torch.export.Dim("sequence", min=1, max=chunk)}, "input_pos": None}
    shapes |= dict.fromkeys(named)
    with torch.no_grad():
        return torch.export.export(method, (tokens, position), named, dynamic_shapes=shapes)


def _max_seq_len(config, asked: int | None) -> int:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise ValueError(
            f"export_llm: the config of a {config.model_type} has no max_position_embeddings, expected a "
            "decoder with attention"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        limit = int(limit * rope["factor"])
    length = min(limit, POSITIONS) if asked is None else asked
    if not 2 <= length <= limit:
        raise ValueError(f"export_llm: max_seq_len is {length}, expected 2 to {limit}")
    return length


def _tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a folder, or None where it has none."""
    if not any(Path(folder).glob("tokenizer*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:  # all of its ways to say so
        raise ValueError(f"export_llm: the tokenizer in {folder} cannot be read: {error!r}") from error


def _check(name: str, value: Any, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"export_llm: {name} is {value}, expected {', '.join(map(str, allowed))}")
