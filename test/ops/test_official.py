"""The torch operators of ExecuTorch's own MLX delegate."""

import executorch_mlx.ops  # noqa: F401  (defines them)
import torch
from executorch.extension.llm.cache.reference_cache import CacheConfig, ContiguousReferenceCache
from executorch.extension.llm.cache.update_and_attend import REGISTRY
from oprows import FLOATS, Dyn, bf16, data, f32, floats, i32, indices, ints, pytest_function, row

mlx = torch.ops.mlx
TOKENS = Dyn("n", 5, also=(1, 2))


def rope(*arguments, **options):
    return lambda x: mlx.rope(x, *arguments, **options)


def rope_at(x, position):
    pos = position.item()
    torch._check(pos >= 0)
    return mlx.rope(x, 8, pos, base=100.0, scale=0.5)


def attention(**options):
    return lambda q, k, v: mlx.custom_sdpa(q, k, v, 3, **options)


def masked(q, k, v, mask):
    return mlx.custom_sdpa(q, k, v, 3, attn_mask=mask, scale=0.3)


class Cache(torch.nn.Module):
    """Writes new keys in place and returns the whole cache."""

    def __init__(self, ring=0):
        super().__init__()
        self.ring = ring
        self.register_buffer("keys", torch.zeros(1, 2, 8, 4))

    def forward(self, update, position):
        pos = position.item()
        torch._check(pos >= 0)
        torch.ops.mlx.kv_cache_update(self.keys, update, pos, self.ring)
        return self.keys * 2


def attend_over_empty_cache(q, k, v):
    """Attention over a new, empty cache, to which the call appends `k` and `v`."""
    key = "test_official"
    REGISTRY.install(key, ContiguousReferenceCache(CacheConfig(n_layers=1, n_kv_heads=2, head_dim=8, capacity=16)))
    with REGISTRY.active(key):
        position = torch.arange(q.shape[2], dtype=i32)[:, None]
        return torch.ops.kvcache.update_and_attend(q, k, v, position, 0, 0.3, f32)


class Experts(torch.nn.Module):
    """gather_qmm with int8 weights or, if `packed`, with pairs of int4 weights in uint8.

    `offset_dtype` is None, torch.int8 for zero points, or torch.float32 for biases.
    """

    def __init__(self, packed=False, offset_dtype=None, bits=4):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        q = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (4, 6, 64), generator=generator)
        if packed:
            lower, upper = (q + 8).unflatten(-1, (-1, 2)).unbind(-1)
            q = lower | upper << 4
        self.bits = bits
        self.register_buffer("q", q.to(torch.uint8 if packed else torch.int8))
        # Scales that half precision represents exactly: the program stores them in the dtype of the input.
        self.register_buffer("scales", torch.rand(4, 6, 2, generator=generator).to(bf16).to(f32))
        shape = dict(size=(4, 6, 2), generator=generator)
        biases = {
            None: lambda: None,
            torch.int8: lambda: torch.randint(-3, 4, **shape).to(torch.int8),
            f32: lambda: torch.randn(**shape),
        }
        self.register_buffer("biases", biases[offset_dtype]())

    def forward(self, x, index):
        flag = torch.zeros((), dtype=i32)
        return mlx.gather_qmm(x, self.q, self.scales, self.biases, index, bits=self.bits, sorted_indices=flag)


def mixture(cutoff):
    """Return a function that gathers the inputs of each expert, multiplies them by a number, and scatters them back."""

    def function(x, experts):
        inputs, chosen, flag, inverse = mlx.moe_gather_inputs(x, experts, 2, cutoff)
        outputs = inputs * (chosen + 1)[:, None, None].to(inputs.dtype)
        return mlx.moe_scatter_outputs(outputs, flag, inverse, 2), chosen, flag, inverse

    return function


ROWS = [
    row("mlx::rope", rope(8, 3), floats(2, 3, 4, 8)),
    row("mlx::rope/part of a row", rope(4, 0, base=100.0), floats(1, 2, TOKENS, 8)),
    row("mlx::rope/traditional", rope(8, 2, traditional=True, scale=2.0), floats(1, 2, 3, 8)),
    row(
        "mlx::rope/periods",
        lambda x, freqs: mlx.rope(x, 8, 5, freqs=freqs),
        floats(1, 2, 3, 8),
        floats(4, low=1, high=50, dtype=f32),
    ),
    row(
        "mlx::rope/angles",
        lambda x, freqs: mlx.rope(x, 8, 5, freqs=freqs),
        floats(1, 2, TOKENS, 8),
        floats(TOKENS, 4, dtype=f32),
    ),
    row("mlx::rope/position", rope_at, floats(1, 2, 3, 8), indices(1, below=9), edge_verified=False),
    row("higher_order.auto_functionalized_v2", Cache(), floats(1, 2, 3, 4), indices(below=5), dtypes=(f32,), calls=4),
    row(
        "higher_order.auto_functionalized_v2/ring",
        Cache(7),
        floats(1, 2, 3, 4),
        indices(below=90),
        dtypes=(f32,),
        calls=4,
    ),
    row("mlx::custom_sdpa", attention(), floats(1, 4, 2, 8), floats(1, 4, 9, 8), floats(1, 4, 9, 8)),
    row(
        "mlx::custom_sdpa/causal",
        attention(is_causal=True),
        floats(1, 4, Dyn("n", 3), 8),
        floats(1, 2, 16, 8),
        floats(1, 2, 16, 8),
    ),
    row(
        "mlx::custom_sdpa/mask",
        masked,
        floats(1, 4, 2, 8),
        floats(1, 4, 9, 8),
        floats(1, 4, 9, 8),
        data([[True, True, False, True, False], [False, True, True, False, True]]),
    ),
    row(
        "kvcache::update_and_attend",
        attend_over_empty_cache,
        floats(1, 4, TOKENS, 8),
        floats(1, 2, TOKENS, 8),
        floats(1, 2, TOKENS, 8),
        dtypes=(f32,),
    ),
    row(
        "mlx::gather_mm", lambda a, b, i: mlx.gather_mm(a, b, i), floats(3, 1, 8), floats(4, 8, 6), indices(3, below=4)
    ),
    row(
        "mlx::gather_mm/both",
        lambda a, b, i, j: mlx.gather_mm(a, b, i, j),
        floats(3, 2, 8),
        floats(4, 8, 6),
        indices(5, 1, below=4),
        indices(2, below=3),
    ),
    row(
        "mlx::gather_mm/ascending",
        lambda a, b, i, flag: mlx.gather_mm(a, b, i, sorted_indices=flag),
        floats(3, 1, 8),
        floats(4, 8, 6),
        data([0, 2, 2]),
        data(1, i32),
    ),
    *(
        row(
            f"mlx::gather_qmm/{name}",
            experts,
            floats(TOKENS, 1, 64),
            indices(TOKENS, below=4),
            dtypes=dtypes,
            loose=3,
            loose_half=3,
        )
        for name, experts, dtypes in [
            ("int4", Experts(), FLOATS),
            ("pairs", Experts(packed=True), FLOATS),
            ("int8", Experts(bits=8), (f32,)),
            ("zero points", Experts(offset_dtype=torch.int8), (f32,)),
            ("biases", Experts(packed=True, offset_dtype=f32), (f32,)),
        ]
    ),
    *(
        row(f"mlx::moe_gather_inputs/{cutoff}", mixture(cutoff), floats(TOKENS, 6), indices(TOKENS, 2, below=4))
        for cutoff in (1, 100)
    ),
    row(
        "mlx::moe_scatter_outputs",
        lambda d, f, o: mlx.moe_scatter_outputs(d, f, o, 2),
        floats(4, 1, 6),
        ints(low=0, high=2, dtype=i32),
        data([2, 0, 3, 1], i32),
    ),
]

test_op_row = pytest_function(ROWS)
