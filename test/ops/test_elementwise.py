"""Unary, binary, comparison and logical operators, selection, casts, softmax."""

import torch
from oprows import (
    FLOATS,
    INTS,
    bf16,
    bools,
    data,
    edge_column,
    edge_row,
    edges,
    f16,
    f32,
    floats,
    i32,
    i64,
    ints,
    pytest_function,
    row,
)

BOOL = (torch.bool,)
NUMBERS = FLOATS + (i32,)
ALL = NUMBERS + BOOL
SHAPES = [(floats(),), (floats(0, 3),)]
PAIR = (edge_column(), edge_row())
SHAPE_PAIRS = [(floats(2, 1, 3), floats(4, 1)), (floats(), floats(2)), (floats(0, 3), floats(3))]
# Integer division by zero is an error in torch.
DIVISION = (edge_column(), edge_row(zeros=False))

# Factors of the tolerance: MLX approximates these functions by polynomials of its own.
LOOSE = {"erf": 2, "expm1": 2, "sinh": 2, "tan": 10, "acosh": 2}

UNARY = (
    [
        row(name, cases=[(edges(),)], once=SHAPES, dtypes=ALL, loose=LOOSE.get(name, 1), signed_zero=name != "sin")
        for name in (
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "cos",
            "cosh",
            "erf",
            "exp",
            "expm1",
            "log",
            "log10",
            "log1p",
            "log2",
            "logical_not",
            "reciprocal",
            "rsqrt",
            "sigmoid",
            "sin",
            "sinh",
            "sqrt",
            "tan",
            "tanh",
            "isnan",
            "isinf",
        )
    ]
    + [
        row(name, cases=[(edges(),)], once=SHAPES, dtypes=FLOATS + INTS, signed_zero=name != "relu")
        for name in ("abs", "ceil", "floor", "neg", "round", "sign", "square", "trunc", "relu")
    ]
    + [
        row(
            "erfinv",
            cases=[(edges(),), (floats(200, low=-1, high=1),)],
            once=SHAPES,
            dtypes=ALL,
            loose=2,
            edge_verified=False,
            nodes=["ErfInvNode"],
        ),
        # Near the largest and the smallest number of each dtype. The products show the digits of subnormal numbers.
        row(
            "exp/limits",
            lambda x: [y for v in (x, x + 0, x[1]) for y in (v.exp(), v.exp() * 2.0**99 * 2.0**35)],
            data(
                [
                    88.72,
                    88.25,
                    88.73,
                    89.5,
                    1e30,
                    -87.2,
                    -87.5,
                    -90.0,
                    -104.5,
                    -1e30,
                    11.0,
                    11.09,
                    11.1,
                    -9.8,
                    -16.7,
                    0.0,
                    float("inf"),
                    float("-inf"),
                    float("nan"),
                ]
            ),
            loose=2,
            dtypes=FLOATS,
        ),
        row(
            "erf/near zero",
            lambda x: torch.erf(x * 1e-3) * 1e3 + torch.erf(x * 1e-30) * 1e30,
            data([51.0, 49.0, 3.0, 1.0, 1e-3, 0.0, -2.0, -7.0]),
            dtypes=(f32,),
        ),
        row("bitwise_not", cases=[(edges(),)], once=SHAPES, dtypes=INTS + BOOL),
        row("sign/bool", torch.sign, bools(2, 3)),
        row("silu", cases=[(edges(),)], once=SHAPES),
        # Finite inputs only: at infinity torch's vectorized kernel returns NaN, its scalar kernel does not.
        # torch's zeros for large negative numbers are negative on processors with AVX-512, and positive on others.
        row(
            "gelu",
            cases=[(floats(40, low=-9, high=9),)],
            once=[(floats(),), (floats(0, 3),)],
            loose=2,
            signed_zero=False,
        ),
        row(
            "gelu/tanh",
            lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            cases=[(floats(2, 3),), (floats(),)],
            loose=2,
        ),
        row(
            "round.decimals",
            lambda x, n: torch.round(x, decimals=n),
            edge_verified=False,
            cases=[(floats(2, 3), 2), (floats(20, low=-300, high=300), -1), (data([1000, -1000, 2.34375, 0.0]), 2)],
        ),
    ]
)

BINARY = (
    [row(name, cases=[PAIR], once=SHAPE_PAIRS, dtypes=ALL) for name in ("add.Tensor", "mul.Tensor")]
    + [row(name, cases=[PAIR], once=SHAPE_PAIRS, dtypes=ALL, signed_zero=False) for name in ("maximum", "minimum")]
    + [
        row("sub.Tensor", cases=[PAIR], once=SHAPE_PAIRS, dtypes=FLOATS + INTS),
        row("div.Tensor", cases=[PAIR], once=SHAPE_PAIRS, dtypes=ALL),
        row("atan2", cases=[PAIR], once=SHAPE_PAIRS, dtypes=FLOATS + (i32,)),
        row(
            "hypot",
            cases=[
                (floats(2, 3), floats(3)),
                (floats(2), data([0.0, float("inf")])),
                (data([float("nan"), float("-inf"), float("nan")]), data([float("inf"), float("nan"), 1.0])),
            ],
            dtypes=FLOATS,
            edge_verified=False,
        ),
        row("logaddexp", cases=[PAIR], once=SHAPE_PAIRS, signed_zero=False),
        row("pow.Tensor_Tensor", cases=[PAIR], once=SHAPE_PAIRS, loose=5),
        row("pow.Tensor_Tensor/int", cases=[(edge_column(), ints(1, 5, low=0, high=4, dtype=None))], dtypes=INTS),
        row("remainder.Tensor", cases=[DIVISION], dtypes=FLOATS + INTS),
        row("remainder.Tensor/zero", cases=[PAIR]),
        row("fmod.Tensor", cases=[DIVISION], dtypes=FLOATS + INTS, signed_zero=False),
        row("fmod.Tensor/zero", cases=[PAIR], signed_zero=False),
        row("floor_divide", cases=[DIVISION], dtypes=FLOATS + INTS),
        row("floor_divide/zero", cases=[PAIR]),
        row(
            "div.Tensor_mode/floor",
            lambda x, y: torch.div(x, y, rounding_mode="floor"),
            cases=[DIVISION],
            dtypes=FLOATS + INTS,
        ),
        row(
            "div.Tensor_mode/trunc",
            lambda x, y: torch.div(x, y, rounding_mode="trunc"),
            cases=[DIVISION],
            dtypes=FLOATS + INTS,
        ),
    ]
    + [row(f"{name}.Tensor", cases=[PAIR], dtypes=INTS + BOOL) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")]
)

COMPARE = [
    row(f"{name}.Tensor", cases=[PAIR], once=SHAPE_PAIRS, dtypes=ALL) for name in ("eq", "ne", "lt", "le", "gt", "ge")
] + [row(name, cases=[PAIR], once=SHAPE_PAIRS, dtypes=ALL) for name in ("logical_and", "logical_or", "logical_xor")]

# Operands that are Python numbers. For the dtype of the result, only the kind of a number counts: bool, int or float.
SCALAR = (
    [
        row(f"{name}.Scalar", cases=[(edges(), -3)], once=[(ints(3, dtype=i32), 2.5)], dtypes=NUMBERS)
        for name in ("mul", "add", "sub", "rsub", "div", "eq", "ne", "lt", "le", "gt", "ge")
    ]
    + [
        row(f"{name}.Scalar", cases=[(edges(), -3)], dtypes=NUMBERS, signed_zero=name != "fmod")
        for name in ("remainder", "fmod", "floor_divide")
    ]
    + [
        row(
            "remainder.Scalar_Tensor",
            cases=[(7, edges(zeros=False)), (-7, edges(zeros=False))],
            dtypes=NUMBERS,
            traced=True,
        ),
        row(
            "div.Scalar_mode/floor",
            lambda x: torch.ops.aten.div.Scalar_mode(x, -3, rounding_mode="floor"),
            edges(),
            dtypes=FLOATS + (i32,),
        ),
        row(
            "div.Scalar_mode/trunc",
            lambda x: torch.ops.aten.div.Scalar_mode(x, -3, rounding_mode="trunc"),
            edges(),
            dtypes=FLOATS + (i32,),
        ),
        row(
            "mul.Tensor/number beyond float16",
            lambda x: (x * 2.5e-8, x / 1e5, x / 1000 // 0.1, torch.div(x / 1000, 0.1, rounding_mode="trunc"), 1e6 // x),
            floats(30, low=4e4, high=6e4),
            dtypes=(f16,),
            edge_verified=False,
        ),
        # A tensor is rounded to float16, unlike a number.
        row(
            "mul.Tensor/tensors beyond float16",
            lambda x: [
                x * constant + (x / constant == x)
                for number in (1e-9, 2.5e-8, 0.1)
                for constant in (
                    torch.full((), number, dtype=x.dtype),
                    torch.full((), number).to(x.dtype),
                    torch.tensor(number, dtype=x.dtype),
                    torch.tensor(number).to(x.dtype),
                    x.new_full((), number),
                    torch.full((1,), number, dtype=x.dtype),
                    torch.full_like(x, number),
                    x.new_tensor(number),
                )
            ],
            floats(30, low=4e4, high=6e4),
            dtypes=(f16, bf16),
            edge_verified=False,
        ),
        row(
            "mul.Tensor/0-d and a number",
            lambda x: (x * 1.5, 0.25 - x, 1.5 / x, x // 0.25, torch.add(x, 0.5, alpha=2), x.reshape(1).sum() * 1e-9),
            floats(low=1, high=2),
            dtypes=(f16, bf16),
            edge_verified=False,
        ),
        row(
            "div.Tensor_mode/lowest int8",
            lambda x: [
                (torch.div(x.to(torch.int8), y, rounding_mode="trunc"), torch.fmod(x.to(torch.int8), y))
                for y in (3, -3)
            ],
            data([-128, -127, 127, 0]),
            dtypes=(f32,),
        ),
        row(
            "bitwise_and.Scalar/number that wraps",
            lambda x: (x.to(torch.int8) & 0xFF, 256 - x.to(torch.uint8), x.to(torch.int8) == 255),
            data([-1, 3, 100]),
            dtypes=(f32,),
        ),
        row("pow.Tensor_Scalar", cases=[(edges(), e) for e in (0, 1, 2, 3, 0.5, -1, -2, -0.5, 2.5)], loose=5),
        row("pow.Tensor_Scalar/int", cases=[(edges(), e) for e in (0, 1, 2, 3, 2.0, 0.5)], dtypes=INTS, loose=5),
        row("pow.Scalar", cases=[(2, floats(2, 3)), (0.5, edges()), (-2.0, edges())], loose=5),
    ]
    + [row(f"{name}.Scalar", ints(2, 3), 5) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")]
    + [
        row(f"{name}.Scalar_Tensor", 5, ints(2, 3), traced=True)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor")
    ]
)

MIXED = [
    row(
        "add.Tensor/promotion",
        torch.add,
        cases=[
            (floats(2, 3, dtype=a), floats(2, 3, dtype=b))
            for a, b in [
                (f32, f16),
                (f16, bf16),
                (i32, f16),
                (torch.uint8, torch.int8),
                (torch.bool, i32),
                (i64, f32),
                (torch.bool, bf16),
            ]
        ]
        + [
            (floats(2, dtype=f16), floats(dtype=f32)),
            (floats(2, dtype=i32), floats(dtype=i64)),
            (floats(2, dtype=i32), floats(dtype=f32)),
            (floats(2, dtype=torch.bool), 1),
            (floats(2, dtype=torch.uint8), 1.5),
            (floats(2, dtype=torch.bool), True),
        ],
    ),
    row(
        "lt.Tensor/promotion",
        torch.lt,
        cases=[
            (floats(2, 3, dtype=a), floats(2, 3, dtype=b))
            for a, b in [(f32, f16), (i64, f32), (torch.uint8, torch.int8), (torch.bool, i32)]
        ]
        + [(floats(3, dtype=i32), 0.5), (floats(3, dtype=torch.bool), 0.5), (floats(3, dtype=f16), 0.1)],
    ),
    row("add.Tensor/alpha", lambda x, y: torch.add(x, y, alpha=3), floats(2, 3), floats(3), dtypes=FLOATS + (i32,)),
    row("sub.Tensor/alpha", lambda x, y: torch.sub(x, y, alpha=-2), floats(2, 3), floats(3), dtypes=FLOATS + (i32,)),
    row("rsub.Tensor", floats(2, 3), floats(3), dtypes=FLOATS + (i32,)),
    row("add.Tensor/number first", lambda x: 2.5 + x, floats(2, 3), dtypes=FLOATS),
]

SELECT = [
    row(
        "where.self",
        cases=[
            (bools(2, 3), floats(2, 3), floats(3)),
            (bools(), edges(), floats()),
            (bools(0, 3), floats(0, 3), floats()),
        ],
        dtypes=ALL,
    ),
    row("where.self/promotion", bools(2, 3), floats(2, 3, dtype=f16), ints(3)),
    row("where.ScalarOther", torch.where, bools(2, 3), floats(2, 3), 1.5),
    row("where.ScalarSelf", torch.where, bools(2, 3), 1.5, floats(2, 3)),
    row("where.Scalar", torch.where, bools(2, 3), 1.5, 2),
    row(
        "masked_fill.Scalar",
        cases=[(floats(2, 3), bools(3), -float("inf")), (floats(2, 3), bools(2, 1), 0)],
        dtypes=FLOATS,
    ),
    row("masked_fill.Scalar/int", torch.masked_fill, ints(2, 3), bools(2, 3), 4),
    row("masked_fill.Tensor", floats(2, 3), bools(3), floats()),
    row("clamp", cases=[(edges(), -1, 2), (edges(), None, 0.5), (edges(), 0.5, None), (edges(), 2, 1)], dtypes=FLOATS),
    row("clamp/int", torch.clamp, cases=[(edges(), 0, 2), (edges(), None, 1), (edges(), 0.5, None)], dtypes=INTS),
    row("clamp.Tensor", cases=[(edges(), data(-1.0), data(2.0)), (floats(2, 3), floats(3), None)]),
]

CASTS = [
    row(
        "_to_copy/" + str(dtype).removeprefix("torch."),
        lambda x, dtype=dtype: x.to(dtype) * 1,
        cases=[(floats(2, 3),), (floats(),)],
        dtypes=ALL,
        traced=True,
    )
    for dtype in (f32, f16, bf16, i64, i32, torch.int16, torch.int8)
] + [
    row(
        "dim_order_ops::_to_dim_order_copy",
        lambda x: x.to(f32),
        cases=[(floats(2, 3, low=0),), (data([0.0, 1.0, 2.75]),)],
        dtypes=ALL,
    ),
    row("_to_copy/bool", lambda x: x.to(torch.bool), edges(), dtypes=FLOATS + INTS, traced=True),
    row(
        "_to_copy/uint8",
        lambda x: x.to(torch.uint8),
        floats(2, 3, low=0, high=250),
        dtypes=FLOATS + (i32,),
        traced=True,
    ),
]

SOFTMAX = [
    row(
        "softmax.int",
        lambda x: torch.softmax(x, -1),
        cases=[
            (floats(2, 3),),
            (floats(2, 0),),
            (
                data(
                    [
                        [1.0, -float("inf")],
                        [float("inf"), 1.0],
                        [float("nan"), 1.0],
                        [-float("inf"), -float("inf")],
                        [1e4, 1e4],
                    ]
                ),
            ),
        ],
    ),
    # Wider than the vectors of the kernels, with values in the last partial vector.
    row(
        "softmax.int/wide",
        lambda x: torch.softmax(x, -1),
        cases=[(floats(3, 77),), (data([[0.5] * 76 + [float("nan")], [-float("inf")] * 76 + [3.0]]),)],
    ),
    row(
        "log_softmax.int/wide",
        lambda x: torch.log_softmax(x, -1),
        cases=[(floats(3, 77),), (data([[0.5] * 76 + [float("nan")], [2.0] * 76 + [-float("inf")]]),)],
        loose=2,
    ),
    row("softmax.int/dtype", lambda x: torch.softmax(x, 0, dtype=f32), floats(4, 2, 3)),
    row("_softmax", torch.softmax, cases=[(floats(2, 3, 4), 1), (floats(2, 3, 4), -3)], traced=True),
    row(
        "log_softmax.int",
        lambda x: torch.log_softmax(x, -1),
        cases=[(floats(2, 3),), (floats(2, 0),), (data([[1.0, -float("inf")], [float("nan"), 1.0], [1e4, 1e4]]),)],
        loose=2,
    ),
    row("_log_softmax", torch.log_softmax, floats(2, 3, 4), 1, traced=True, loose=2),
]

ROWS = [
    *UNARY,
    *BINARY,
    *COMPARE,
    *SCALAR,
    *MIXED,
    *SELECT,
    *CASTS,
    *SOFTMAX,
    row("operator.getitem", lambda x: x.split(2)[1], floats(4, 3)),
]

test_op_row = pytest_function(ROWS)
