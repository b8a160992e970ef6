"""Small programs with the methods and metadata of an LLM program, on ExecuTorch's portable kernels.

Each program computes its tokens by a simple rule, so that a test can predict the tokens.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from executorch.exir import to_edge, to_edge_transform_and_lower

# The optional parameters of the sampling head, with example values.
OPTIONAL = {"seed": torch.tensor(0), "top_k": torch.tensor(0), "min_p": torch.tensor(0.0)}
BYTES = [bytes([i]) for i in range(256)]  # token i is the byte i

# `rule(self, tokens, input_pos, **parameters)` returns the next token [1], or logits.
TokenRule = Callable[..., torch.Tensor]


class _Program(torch.nn.Module):
    def __init__(self, rule: TokenRule, names: list[str], state: dict[str, torch.Tensor]):
        super().__init__()
        self.rule = rule
        self.names = names
        for name, value in state.items():
            self.register_buffer(name, value)

    def forward(self, tokens, input_pos, *values):
        return self.rule(self, tokens, input_pos, **dict(zip(self.names, values, strict=True)))


def export(
    path: Path,
    rule: TokenRule,
    *,
    vocabulary: list[bytes] | None = BYTES,
    vocab_size: int = 256,
    max_seq_len: int = 8,
    max_context_len: int = 16,
    optional: tuple[str, ...] = tuple(OPTIONAL),
    parameters: bool = True,
    state: dict[str, torch.Tensor] | None = None,
    partitioner: object | None = None,
    **metadata: object,
) -> Path:
    """Export a program that returns `rule(self, tokens, input_pos, **parameters)`.

    - `vocabulary`: the bytes of each token, which the program stores; None stores none.
    - `parameters`: False removes the sampling parameters, as for a method that returns logits.
    - `optional`: the optional sampling parameters that the program takes.
    - `state`: the buffers of `self`.
    - `partitioner`: what lowers the program; None leaves it to ExecuTorch's portable kernels.
    - `metadata`: values that replace those of metadata methods. The value None removes the method.
    """
    optional = optional if parameters else ()
    examples = {"temperature": torch.tensor(0.0), "top_p": torch.tensor(1.0)} if parameters else {}
    examples |= {name: OPTIONAL[name] for name in optional}
    module = _Program(rule, list(examples), state or {})
    sequence = torch.export.Dim("sequence", min=1, max=max_seq_len)
    program = torch.export.export(
        module,
        (torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), *examples.values()),
        dynamic_shapes=({1: sequence}, None, *([(None,) * len(examples)] if examples else [])),
    )
    methods: dict[str, object] = {
        "get_max_seq_len": max_seq_len,
        "get_max_context_len": max_context_len,
        "get_vocab_size": vocab_size,
        "get_bos_id": -1,
        "get_eos_ids": [],
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "sampling_head": True,
        **{f"sampling_{name}": name in optional for name in OPTIONAL},
    }
    if vocabulary is not None:
        offsets = [0, *torch.tensor([len(token) for token in vocabulary]).cumsum(0).tolist()]
        methods["token_bytes"] = torch.tensor(list(b"".join(vocabulary)), dtype=torch.uint8)
        methods["token_offsets"] = torch.tensor(offsets)
    methods |= metadata
    kept = {name: value for name, value in methods.items() if value is not None}
    if partitioner is None:
        lowered = to_edge(program, constant_methods=kept)
    else:
        lowered = to_edge_transform_and_lower(program, partitioner=[partitioner], constant_methods=kept)
    path.write_bytes(lowered.to_executorch().buffer)
    return path


def successor(self, tokens, input_pos, **_):
    """A rule: returns the last token plus 1."""
    return (tokens[:, -1] + 1) % 256


def scripted(script: bytes) -> dict:
    """Arguments of `export` for a program that returns the bytes of `script` in order, after a prompt
    of one token."""

    def rule(self, tokens, input_pos, **_):
        return self.script[input_pos + tokens.shape[1] - 1]

    state = {"script": torch.tensor(list(script))}
    return {"rule": rule, "state": state, "max_context_len": max(8, len(script))}


def seeded(self, tokens, input_pos, *, seed, **_):
    """A rule: returns the lowest byte of the seed."""
    return (seed & 255).reshape(1)


def digits_of_parameters(self, tokens, input_pos, *, temperature, top_p, top_k, min_p, **_):
    """A rule: returns `1000 * t + 100 * p + 10 * m + top_k`. t, p and m are temperature, top_p and min_p in tenths."""
    digits = [torch.round(value * 10).to(torch.int64) for value in (temperature, top_p, min_p)]
    return (digits[0] * 1000 + digits[1] * 100 + digits[2] * 10 + top_k).reshape(1)


def summed(self, tokens, input_pos, **_):
    """A rule: returns the sum of (position + 1) * token over the context, modulo 256.

    The buffer `self.cache` keeps the tokens of earlier calls.
    """
    length = tokens.shape[1]
    positions = torch.arange(length) + input_pos
    self.cache.index_copy_(0, positions, tokens[0])
    is_filled = self.positions < input_pos + length
    weighted = self.cache * (self.positions + 1)
    return torch.where(is_filled, weighted, torch.zeros_like(weighted)).sum().reshape(1) % 256


def summed_state(capacity: int) -> dict[str, torch.Tensor]:
    """The buffers of `summed`."""
    return {"cache": torch.zeros(capacity, dtype=torch.int64), "positions": torch.arange(capacity)}


class _RowMethod(torch.nn.Module):
    """The method prefill, decode or verify of a program with rows. The token after `t` is `t + 1`, plus the lowest 3
    bits of the seed if the temperature is positive."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, tokens, input_pos, row, temperature, top_p, seed):
        if self.name == "verify":
            last, seed = tokens, seed + torch.arange(tokens.shape[1])
        else:
            last = tokens[:, -1]
        return (last + 1 + torch.where(temperature > 0, seed & 7, torch.zeros_like(seed))) % 256


def export_rows(path: Path, rows: int, *, max_seq_len: int = 8, max_context_len: int = 10**12, **metadata) -> Path:
    """Export a program with the methods prefill, decode and verify, for `rows` rows and without a cache."""
    sequence = torch.export.Dim("sequence", min=1, max=max_seq_len)
    programs = {}
    for name in ("prefill", "decode", "verify"):
        batch, parameter_shape = (rows, (rows,)) if name == "decode" else (1, ())
        inputs = (
            torch.zeros(batch, 1 if name == "decode" else 2, dtype=torch.int64),
            torch.zeros(batch, dtype=torch.int64),
            torch.zeros(batch, dtype=torch.int64),
            torch.zeros(parameter_shape),
            torch.ones(parameter_shape),
            torch.zeros(parameter_shape, dtype=torch.int64),
        )
        shapes = (None if name == "decode" else {1: sequence}, None, None, None, None, None)
        programs[name] = torch.export.export(_RowMethod(name), inputs, dynamic_shapes=shapes)
    methods = {
        "get_max_seq_len": max_seq_len,
        "get_max_context_len": max_context_len,
        "get_max_batch_size": rows,
        "get_vocab_size": 256,
        "sampling_head": True,
        "sampling_seed": True,
        "token_bytes": torch.arange(256, dtype=torch.uint8),
        "token_offsets": torch.arange(257),
    } | metadata
    path.write_bytes(to_edge(programs, constant_methods=methods).to_executorch().buffer)
    return path
