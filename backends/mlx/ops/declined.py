"""Operators without a lowering, and what to write instead. `explain()` reports these reasons."""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY

aten = torch.ops.aten

_DATA = "the shape of the result depends on the data; "
_FACTORS = "MLX has no such factorization on every device; compute it at export if the matrix is a constant"

DECLINED = {
    aten.nonzero: _DATA + "use torch.where(mask, x, 0), or topk with a fixed count",
    aten.masked_select: _DATA + "use torch.where(mask, x, 0)",
    aten._unique2: _DATA + "use torch.sort, and compare neighbors",
    aten.unique_consecutive: _DATA + "compare x[1:] with x[:-1]",
    aten.unique_dim: _DATA + "use torch.sort, and compare neighbors",
    aten.bincount: _DATA + "use torch.zeros(n, dtype=torch.int64).scatter_add(0, x, torch.ones_like(x)) with a fixed n",
    aten._linalg_svd: _FACTORS,
    aten._linalg_eigh: _FACTORS,
    aten._linalg_eigvals: _FACTORS,
    aten.linalg_eig: _FACTORS,
    aten.linalg_lu: _FACTORS + ", or use torch.linalg.solve",
    aten.linalg_lu_factor_ex: _FACTORS + ", or use torch.linalg.solve",
    aten.linalg_qr: _FACTORS + ", or use the Cholesky factor of x.mT @ x",
    aten.linalg_householder_product: _FACTORS,
    aten.linalg_pinv: "the pseudoinverse needs a singular value decomposition; use torch.linalg.inv(x.mT @ x) @ x.mT",
    aten.linalg_inv_ex: "use torch.linalg.inv, which is delegated for matrices of static size",
    aten._linalg_solve_ex: "use torch.linalg.solve with matrices of static size",
    aten.linalg_cholesky_ex: "use torch.linalg.cholesky, which is delegated for matrices of static size",
    aten._linalg_det: "use torch.linalg.det with matrices of static size",
    aten._linalg_slogdet: "use torch.linalg.slogdet with matrices of static size",
    aten.linalg_matrix_exp: "use a Taylor series: the sum of torch.linalg.matrix_power(x, k) / k!",
    aten.frexp: "use torch.floor(torch.log2(x.abs())) + 1 for the exponent",
    aten.special_zeta: "use torch.polygamma, of order 0 or 1",
    **dict.fromkeys(
        (aten.poisson, aten.binomial, aten._standard_gamma, aten._sample_dirichlet),
        "draw these numbers on the host, and pass them as an input of the program",
    ),
    aten.random.default: "use torch.randint with a range of at most 2^31 numbers",
    **dict.fromkeys(
        (
            aten.lstm.data,
            aten.gru.data,
            aten.rnn_tanh.data,
            aten.rnn_relu.data,
            aten._pack_padded_sequence,
            aten._pad_packed_sequence,
        ),
        "packed sequences are unsupported; pad the sequences and mask the result",
    ),
}

for _operator, _reason in DECLINED.items():
    _is_overload = isinstance(_operator, torch._ops.OpOverload)
    for _target in [_operator] if _is_overload else [getattr(_operator, o) for o in _operator.overloads()]:
        REGISTRY.decline(_target, _reason)
