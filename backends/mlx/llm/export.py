"""A Hugging Face causal LM → a `.pte` that samples inside.

    python -m executorch_mlx.llm.export MODEL -o model.pte

The program's one method is `forward(tokens, input_pos, temperature, top_p, seed, top_k,
min_p) -> token`; the last three are there only if asked for. Its metadata methods follow
ExecuTorch's names for LLMs, and add the table of token bytes, so that a runner needs no
tokenizer to print text.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from executorch.exir import ExecutorchProgramManager, to_edge_transform_and_lower
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ..partitioner import MLXPartitioner, Report
from .attention import use_cached_attention
from .cache import StaticKVCache
from .sampling import SamplingHead
from .tokens import token_table

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Sampling:
    """Which optional parameters of `mlx::sample` are inputs of the program."""

    seed: bool = True
    top_k: bool = True
    min_p: bool = True

    def inputs(self) -> dict[str, torch.Tensor]:
        """Example values, in the order of the method's inputs."""
        examples = {
            "temperature": torch.tensor(0.8),
            "top_p": torch.tensor(0.95),
            "seed": torch.tensor(0) if self.seed else None,
            "top_k": torch.tensor(40) if self.top_k else None,
            "min_p": torch.tensor(0.05) if self.min_p else None,
        }
        return {name: value for name, value in examples.items() if value is not None}


@dataclass(frozen=True)
class ExportedLLM:
    """What `export_llm` made. `report` says what was delegated."""

    program: ExecutorchProgramManager
    report: Report
    metadata: dict[str, Any]

    def save(self, path: str | Path) -> int:
        """Write the `.pte`; returns its size in bytes."""
        with open(path, "wb") as file:
            self.program.write_to_file(file)
            return file.tell()


class CachedDecoder(torch.nn.Module):
    """A causal LM over a cache of its own: `(tokens [B, S], input_pos [1]) -> logits [B, 1, V]`,
    those of the last position only."""

    def __init__(self, model: PreTrainedModel, *, batch: int, max_seq_len: int):
        super().__init__()
        self.model = model
        self.cache = StaticKVCache.on(
            self, model.config, batch=batch, capacity=max_seq_len, dtype=model.dtype
        )
        use_cached_attention(model, self.cache)

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) + input_pos
        return self.model(
            input_ids=tokens,
            position_ids=positions.unsqueeze(0),
            past_key_values=self.cache.at(input_pos),
            use_cache=True,
            logits_to_keep=1,
        ).logits


def export_llm(
    model: str | Path | PreTrainedModel,
    *,
    tokenizer: Any = None,
    max_seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    sampling: Sampling | None = Sampling(),
) -> ExportedLLM:
    """Export `model`, a Hugging Face folder or a loaded model, for MLX.

    `max_seq_len` is the capacity of the cache, by default all positions of the model.
    With `sampling=None` the program returns the logits of the last position instead of a
    token. Raises ValueError if `max_seq_len` is not within 2 and the model's positions.
    """
    if not isinstance(model, PreTrainedModel):
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
        model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    model = model.to(dtype).eval()
    limit = model.config.max_position_embeddings
    max_seq_len = limit if max_seq_len is None else max_seq_len
    if not 2 <= max_seq_len <= limit:
        raise ValueError(f"export_llm: max_seq_len is {max_seq_len}, expected 2 to {limit}")

    decoder = CachedDecoder(model, batch=1, max_seq_len=max_seq_len)
    sequence = torch.export.Dim("sequence", min=1, max=max_seq_len)
    arguments = (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    parameters = {} if sampling is None else sampling.inputs()
    module = _Positional(decoder, tuple(parameters)) if sampling else decoder
    shapes = ({1: sequence}, None, *([(None,) * len(parameters)] if sampling else []))
    with torch.no_grad():
        program = torch.export.export(
            module,
            (*arguments, *parameters.values()),
            dynamic_shapes=shapes,
        )
    metadata = _metadata(model, tokenizer, max_seq_len, sampling)
    partitioner = MLXPartitioner()
    lowered = to_edge_transform_and_lower(
        program, partitioner=[partitioner], constant_methods=metadata
    )
    return ExportedLLM(lowered.to_executorch(), partitioner.explain(), metadata)


class _Positional(torch.nn.Module):
    """`SamplingHead` with its parameters by position, as a program's inputs are."""

    def __init__(self, decoder: CachedDecoder, names: tuple[str, ...]):
        super().__init__()
        self.head = SamplingHead(decoder)
        self.names = names

    def forward(self, tokens, input_pos, *parameters):
        return self.head(tokens, input_pos, **dict(zip(self.names, parameters, strict=True)))


def _metadata(model, tokenizer, max_seq_len: int, sampling: Sampling | None) -> dict[str, Any]:
    config = model.config
    eos = config.eos_token_id
    metadata = {
        "get_max_seq_len": max_seq_len,
        "get_max_context_len": max_seq_len,
        "get_vocab_size": config.vocab_size,
        "get_bos_id": -1 if config.bos_token_id is None else config.bos_token_id,
        "get_eos_ids": [] if eos is None else eos if isinstance(eos, list) else [eos],
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "sampling_head": sampling is not None,
        "sampling_seed": sampling is not None and sampling.seed,
        "sampling_top_k": sampling is not None and sampling.top_k,
        "sampling_min_p": sampling is not None and sampling.min_p,
    }
    if tokenizer is not None:
        metadata["token_bytes"], metadata["token_offsets"] = token_table(
            tokenizer, config.vocab_size
        )
    return metadata


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="Hugging Face folder or hub id")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--max-seq-len", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    options = parser.parse_args()
    exported = export_llm(
        options.model, max_seq_len=options.max_seq_len, dtype=DTYPES[options.dtype]
    )
    size = exported.save(options.output)
    print(exported.report)
    print(f"{options.output}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
