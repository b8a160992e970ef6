"""Lowering rules, one file per family of operators. Importing this package registers all of them.

In every handler, `P` is the `Lowering`, and `P.out` is the fake value of the FX node that is being lowered.
"""

from executorch.exir.passes import dim_order_ops_registry  # noqa: F401  (defines dim_order_ops)

from .. import custom_kernel_ops, custom_ops  # noqa: F401
from . import (  # noqa: F401
    attention,
    backward,
    composite,
    control,
    conv,
    create,
    cumulative,
    declined,
    decomposed,
    elementwise,
    forms,
    histogram,
    index,
    integer,
    kv_cache,
    linalg,
    loop,
    median,
    norm,
    official,
    pool,
    quant,
    quantized_cache,
    random,
    recurrence,
    reduce,
    resample,
    rnn,
    scalar,
    scatter,
    scatter_reduce,
    shape,
    solve,
    sort,
    special,
    strided,
    training,
)
