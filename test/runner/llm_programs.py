"""Small programs that keep the contract of an LLM program, on portable kernels.

Each draws its token by a rule that a test can work out by hand; ExecuTorch runs them like
any other.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from executorch.exir import to_edge

OPTIONAL = {
    "seed": torch.tensor(0),
    "top_k": torch.tensor(0),
    "min_p": torch.tensor(0.0),
}
BYTES = [bytes([i]) for i in range(256)]

Draw = Callable[..., torch.Tensor]


class _Program(torch.nn.Module):
    def __init__(self, draw: Draw, names: list[str], state: dict[str, torch.Tensor]):
        super().__init__()
        self.draw = draw
        self.names = names
        for name, value in state.items():
            self.register_buffer(name, value)

    def forward(self, tokens, input_pos, *values):
        return self.draw(self, tokens, input_pos, **dict(zip(self.names, values, strict=True)))


def export(
    path: Path,
    draw: Draw,
    *,
    tokens: list[bytes] | None = BYTES,
    vocab_size: int = 256,
    max_seq_len: int = 8,
    max_context_len: int = 16,
    optional: tuple[str, ...] = tuple(OPTIONAL),
    parameters: bool = True,
    state: dict[str, torch.Tensor] | None = None,
    **metadata: object,
) -> Path:
    """Write the program that returns `draw(self, tokens, input_pos, **parameters)`.

    Without `parameters` there are none, as for logits. `state` holds the buffers that `self` has.
    `metadata` replaces metadata methods; None takes one away.
    """
    optional = optional if parameters else ()
    examples = {"temperature": torch.tensor(0.0), "top_p": torch.tensor(1.0)} if parameters else {}
    examples |= {name: OPTIONAL[name] for name in optional}
    module = _Program(draw, list(examples), state or {})
    sequence = torch.export.Dim("sequence", min=1, max=max_seq_len)
    program = torch.export.export(
        module,
        (
            torch.zeros(1, 2, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
            *examples.values(),
        ),
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
    if tokens is not None:
        ends = [0, *torch.tensor([len(token) for token in tokens]).cumsum(0).tolist()]
        methods["token_bytes"] = torch.tensor(list(b"".join(tokens)), dtype=torch.uint8)
        methods["token_offsets"] = torch.tensor(ends)
    methods |= metadata
    kept = {name: value for name, value in methods.items() if value is not None}
    path.write_bytes(to_edge(program, constant_methods=kept).to_executorch().buffer)
    return path


def successor(self, tokens, input_pos, **_):
    """The number after the last token."""
    return (tokens[:, -1] + 1) % 256


def scripted(script: bytes) -> dict:
    """Arguments of `export` for a program that draws `script`, byte by byte, after a prompt of
    one token."""

    def draw(self, tokens, input_pos, **_):
        return self.script[input_pos + tokens.shape[1] - 1]

    state = {"script": torch.tensor(list(script))}
    return {"draw": draw, "state": state, "max_context_len": max(8, len(script))}


def seeded(self, tokens, input_pos, *, seed, **_):
    """The lowest byte of the seed."""
    return (seed & 255).reshape(1)


def parameters(self, tokens, input_pos, *, temperature, top_p, top_k, min_p, **_):
    """One decimal digit for each parameter: temperature, top_p, min_p in tenths, then top_k."""
    digits = [torch.round(value * 10).to(torch.int64) for value in (temperature, top_p, min_p)]
    return (digits[0] * 1000 + digits[1] * 100 + digits[2] * 10 + top_k).reshape(1)


def summed(self, tokens, input_pos, **_):
    """The sum of (position + 1) * token over the whole context, which a cache remembers."""
    length = tokens.shape[1]
    positions = torch.arange(length) + input_pos
    self.cache.index_copy_(0, positions, tokens[0])
    known = self.positions < input_pos + length
    weighted = self.cache * (self.positions + 1)
    return torch.where(known, weighted, torch.zeros_like(weighted)).sum().reshape(1) % 256


def summed_state(capacity: int) -> dict[str, torch.Tensor]:
    """The buffers of `summed`."""
    return {
        "cache": torch.zeros(capacity, dtype=torch.int64),
        "positions": torch.arange(capacity),
    }
