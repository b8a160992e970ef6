"""Lowering rules, one file a family. Importing this package registers every one of them."""

from executorch.exir.passes import dim_order_ops_registry  # noqa: F401  (defines dim_order_ops)

from .. import custom_kernel_ops, custom_ops, patterns  # noqa: F401
from . import (  # noqa: F401
    attention,
    composite,
    control,
    conv,
    create,
    cumulative,
    elementwise,
    index,
    kv_cache,
    linalg,
    loop,
    median,
    norm,
    official,
    pool,
    quant,
    random,
    reduce,
    scalar,
    scatter,
    scatter_reduce,
    shape,
    sort,
    spelled,
    strided,
)
