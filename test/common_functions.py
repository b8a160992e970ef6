"""Which of torch's common functions can be delegated whole?

    python test/common_functions.py [NAME ...] [--extensions]

Exports a program for each function of `FUNCTIONS`, lowers it, and runs it if all of it was delegated. Prints one line
for each function that is not delegated whole, that fails, or whose results differ from eager torch; then the counts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import warnings

import torch
import torch.nn.functional as F
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from loaded_method import LoadedMethod

torch.manual_seed(0)
x34 = torch.randn(3, 4)
pos = torch.rand(3, 4) + 0.5
i34 = torch.randint(1, 20, (3, 4))
j34 = torch.randint(1, 20, (3, 4))
v6 = torch.randn(6)
sq = torch.randn(4, 4) + 4 * torch.eye(4)
sq33 = torch.randn(2, 3, 3) + 3 * torch.eye(3)
spd = sq @ sq.T
img = torch.randn(1, 2, 6, 8)
seq = torch.randn(2, 3, 10)
target = torch.tensor([1, 0, 3])
b34 = x34 > 0

FUNCTIONS = {
    # elementwise
    **{
        n: (getattr(torch, n), (x34 / 3,))
        for n in (
            "abs",
            "acos",
            "acosh",
            "asin",
            "asinh",
            "atan",
            "atanh",
            "ceil",
            "cos",
            "cosh",
            "deg2rad",
            "erf",
            "erfc",
            "erfinv",
            "exp",
            "exp2",
            "expm1",
            "floor",
            "frac",
            "i0",
            "isfinite",
            "isinf",
            "isnan",
            "isneginf",
            "isposinf",
            "log",
            "log10",
            "log1p",
            "log2",
            "logit",
            "neg",
            "positive",
            "rad2deg",
            "reciprocal",
            "relu",
            "round",
            "rsqrt",
            "sgn",
            "sigmoid",
            "sign",
            "signbit",
            "sin",
            "sinc",
            "sinh",
            "sqrt",
            "square",
            "tan",
            "tanh",
            "trunc",
            "nan_to_num",
            "lgamma",
            "digamma",
            "isreal",
            "angle",
            "conj",
            "real",
        )
    },
    **{
        f"special.{n}": (getattr(torch.special, n), (pos,))
        for n in (
            "entr",
            "erfcx",
            "expit",
            "gammaln",
            "i0e",
            "i1",
            "i1e",
            "log_ndtr",
            "ndtr",
            "ndtri",
            "psi",
            "bessel_j0",
            "bessel_j1",
            "bessel_y0",
            "modified_bessel_i0",
            "spherical_bessel_j0",
        )
    },
    "special.softmax": (lambda x: torch.special.softmax(x, -1), (x34,)),
    "special.zeta": (torch.special.zeta, (pos + 1, pos)),
    "polygamma": (lambda x: torch.polygamma(1, x), (pos,)),
    "mvlgamma": (lambda x: torch.mvlgamma(x, 2), (pos + 2,)),
    "special.gammainc": (torch.special.gammainc, (pos, pos + 1)),
    "special.xlogy": (torch.special.xlogy, (pos, pos)),
    "special.xlog1py": (torch.special.xlog1py, (pos, pos)),
    **{
        n: (getattr(torch, n), (x34, pos))
        for n in (
            "add",
            "sub",
            "mul",
            "div",
            "atan2",
            "maximum",
            "minimum",
            "fmax",
            "fmin",
            "fmod",
            "remainder",
            "hypot",
            "copysign",
            "logaddexp",
            "logaddexp2",
            "floor_divide",
            "true_divide",
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "nextafter",
            "heaviside",
            "isclose",
            "dist",
            "xlogy",
            "cdist",
            "logical_xor",
            "equal",
            "allclose",
        )
    },
    "pow": (torch.pow, (pos, x34)),
    "float_power": (lambda x: torch.float_power(x, 2).float(), (pos,)),
    "gcd": (torch.gcd, (i34, j34)),
    "lcm": (torch.lcm, (i34, j34)),
    "bitwise_and": (torch.bitwise_and, (i34, j34)),
    "bitwise_left_shift": (torch.bitwise_left_shift, (i34, j34 % 5)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (x34,)),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3), (x34, pos)),
    "addcmul": (torch.addcmul, (x34, pos, pos)),
    "addcdiv": (torch.addcdiv, (x34, pos, pos)),
    "ldexp": (torch.ldexp, (x34, i34 % 4)),
    "frexp": (torch.frexp, (x34,)),
    # creation
    "tril_indices": (lambda x: x + torch.tril_indices(3, 3).sum(), (x34,)),
    "triu_indices": (lambda x: x + torch.triu_indices(3, 4, 1).sum(), (x34,)),
    "linspace": (lambda x: x + torch.linspace(0, 1, 4), (x34,)),
    "logspace": (lambda x: x + torch.logspace(0, 1, 4), (x34,)),
    "eye": (lambda x: x @ torch.eye(4), (x34,)),
    "diag": (lambda x: torch.diag(x), (v6,)),
    "diag_embed": (torch.diag_embed, (x34,)),
    "diagonal": (torch.diagonal, (sq,)),
    "diagflat": (torch.diagflat, (v6,)),
    "diagonal_scatter": (torch.diagonal_scatter, (sq, torch.zeros(4))),
    "vander": (torch.vander, (v6,)),
    "block_diag": (torch.block_diag, (x34, sq)),
    "cartesian_prod": (torch.cartesian_prod, (v6, v6)),
    "combinations": (torch.combinations, (v6,)),
    "meshgrid": (lambda a, b: torch.meshgrid(a, b, indexing="ij"), (v6, v6)),
    "hann_window": (lambda x: x * torch.hann_window(4), (x34,)),
    "kaiser_window": (lambda x: x * torch.kaiser_window(4), (x34,)),
    # reductions and statistics
    **{
        n: (getattr(torch, n), (x34,))
        for n in (
            "sum",
            "mean",
            "prod",
            "amax",
            "amin",
            "max",
            "min",
            "argmax",
            "argmin",
            "std",
            "var",
            "median",
            "nanmedian",
            "nansum",
            "nanmean",
            "mode",
            "std_mean",
            "var_mean",
            "count_nonzero",
            "cov",
            "corrcoef",
            "trace",
            "aminmax",
            "norm",
            "msort",
            "unique",
            "nonzero",
            "argwhere",
        )
    },
    "logsumexp": (lambda x: torch.logsumexp(x, 0), (x34,)),
    "nanmedian.dim": (lambda x: tuple(torch.nanmedian(x, 1)), (x34,)),
    "quantile": (lambda x: torch.quantile(x, 0.3, dim=1), (x34,)),
    "nanquantile": (lambda x: torch.nanquantile(x, 0.3, dim=1), (x34,)),
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), (x34,)),
    "bincount": (lambda i: torch.bincount(i), (i34.reshape(-1),)),
    "bincount(minlength)": (lambda i: torch.bincount(i, minlength=30)[:30], (i34.reshape(-1),)),
    "histc": (lambda x: torch.histc(x, 5, -2.0, 2.0), (v6,)),
    "histc(range of x)": (lambda x: torch.histc(x, 5), (v6,)),
    "histogram": (lambda x: torch.histogram(x, 5, range=(-2.0, 2.0))[0], (v6,)),
    "cumsum": (lambda x: x.cumsum(1), (x34,)),
    "cumprod": (lambda x: x.cumprod(1), (x34,)),
    "cummax": (lambda x: tuple(x.cummax(1)), (x34,)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), (x34,)),
    "cumulative_trapezoid": (torch.cumulative_trapezoid, (x34,)),
    "trapezoid": (torch.trapezoid, (x34,)),
    "diff": (torch.diff, (x34,)),
    "gradient": (lambda x: torch.gradient(x), (v6,)),
    # sort and search
    "sort": (lambda x: tuple(torch.sort(x)), (x34,)),
    "argsort": (torch.argsort, (x34,)),
    "topk": (lambda x: tuple(torch.topk(x, 2)), (x34,)),
    "kthvalue": (lambda x: tuple(torch.kthvalue(x, 2)), (x34,)),
    "searchsorted": (torch.searchsorted, (v6.sort()[0], v6)),
    "bucketize": (torch.bucketize, (x34, v6.sort()[0])),
    "isin": (torch.isin, (i34, j34)),
    "unique_consecutive": (torch.unique_consecutive, (v6,)),
    # index
    "gather": (lambda x, i: torch.gather(x, 1, i), (x34, i34 % 4)),
    "scatter": (lambda x, i: x.scatter(1, i[:, :1], 2.0), (x34, i34 % 4)),
    "scatter_add": (lambda x, i: x.scatter_add(1, i, x), (x34, i34 % 4)),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(1, i, x, "amax"), (x34, i34 % 4)),
    "index_add": (lambda x, i: x.index_add(0, i, x), (x34, torch.tensor([0, 2, 0]))),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), (x34, torch.tensor([0, 2]))),
    "index_select": (lambda x, i: x.index_select(0, i), (x34, torch.tensor([0, 2]))),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, x, "amax"), (x34, torch.tensor([0, 2, 0]))),
    "take": (torch.take, (x34, i34 % 12)),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), (x34, i34 % 4)),
    "put": (lambda x, i: torch.put(x, i, torch.ones(2)), (x34, torch.tensor([1, 5]))),
    "masked_fill": (lambda x, m: x.masked_fill(m, 1.0), (x34, b34)),
    "masked_scatter": (lambda x, m: x.masked_scatter(m, x), (x34, b34)),
    "masked_select": (torch.masked_select, (x34, b34)),
    "select_scatter": (lambda x: torch.select_scatter(x, x[0], 0, 1), (x34,)),
    "slice_scatter": (lambda x: torch.slice_scatter(x, x[:2], 0, 1, 3), (x34,)),
    "bool mask assignment": (lambda x, m: torch.where(m, 0, x), (x34, b34)),
    "one_hot": (lambda i: F.one_hot(i, 30), (i34,)),
    "embedding_bag": (lambda i, w: F.embedding_bag(i % 5, w), (i34, torch.randn(5, 3))),
    # shape
    "roll": (lambda x: x.roll(1, 0), (x34,)),
    "flip": (lambda x: x.flip(0), (x34,)),
    "rot90": (torch.rot90, (x34,)),
    "tile": (lambda x: x.tile(2, 1), (x34,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), (x34,)),
    "unfold": (lambda x: x.unfold(0, 2, 1), (v6,)),
    "F.unfold": (lambda x: F.unfold(x, 3), (img,)),
    "F.fold": (lambda x: F.fold(x, (4, 5), (2, 2)), (torch.randn(1, 8, 12),)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (torch.randn(1, 4, 3, 3),)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (img,)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (torch.randn(1, 4, 3, 3),)),
    "tensor_split": (lambda x: torch.tensor_split(x, 3), (v6,)),
    # linear algebra
    "det": (torch.det, (sq,)),
    "det(batch)": (torch.linalg.det, (sq33,)),
    "slogdet": (lambda x: tuple(torch.linalg.slogdet(x)), (sq33,)),
    "logdet": (torch.logdet, (spd,)),
    "inverse": (torch.linalg.inv, (sq33,)),
    "solve": (torch.linalg.solve, (sq, torch.randn(4, 2))),
    "solve_triangular": (lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False), (sq, torch.randn(4, 2))),
    "triangular_solve": (lambda a, b: torch.triangular_solve(b, a.triu())[0], (sq, torch.randn(4, 2))),
    "cholesky": (torch.linalg.cholesky, (spd,)),
    "cholesky_solve": (torch.cholesky_solve, (torch.randn(4, 2), sq.tril())),
    "cholesky_inverse": (torch.cholesky_inverse, (sq.tril(),)),
    "qr": (lambda x: tuple(torch.linalg.qr(x)), (sq,)),
    "svd": (lambda x: torch.linalg.svdvals(x), (sq,)),
    "eigh": (lambda x: torch.linalg.eigvalsh(x), (spd,)),
    "pinv": (torch.linalg.pinv, (sq,)),
    "lu": (lambda x: torch.linalg.lu_factor(x)[0], (sq,)),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x, 3), (sq,)),
    "matrix_exp": (torch.linalg.matrix_exp, (sq / 8,)),
    "matrix_rank": (torch.linalg.matrix_rank, (sq,)),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, 3), (x34,)),
    "matrix_norm": (lambda x: torch.linalg.matrix_norm(x), (x34,)),
    "cross": (lambda a, b: torch.linalg.cross(a, b), (torch.randn(4, 3), torch.randn(4, 3))),
    "kron": (torch.kron, (x34, sq)),
    "outer": (torch.outer, (v6, v6)),
    "dot": (torch.dot, (v6, v6)),
    "mv": (torch.mv, (x34, torch.randn(4))),
    "baddbmm": (torch.baddbmm, (sq33, sq33, sq33)),
    "addbmm": (torch.addbmm, (sq33[0], sq33, sq33)),
    "addr": (torch.addr, (torch.randn(6, 6), v6, v6)),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->ik", a, b), (sq33, sq33)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 2), (sq33, sq33[0])),
    "householder_product": (torch.linalg.householder_product, (sq, torch.rand(4))),
    # fft
    "fft.fft": (lambda x: torch.view_as_real(torch.fft.fft(x)), (x34,)),
    "fft.rfft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), (x34,)),
    "fft.rfft abs": (lambda x: torch.fft.rfft(x).abs(), (x34,)),
    "fft.irfft": (lambda x: torch.fft.irfft(torch.view_as_complex(x)), (torch.randn(3, 4, 2),)),
    "fft.ifft": (lambda x: torch.view_as_real(torch.fft.ifft(torch.view_as_complex(x))), (torch.randn(3, 4, 2),)),
    "fft.fft2": (lambda x: torch.fft.fft2(x).abs(), (x34,)),
    "fft.fftshift": (torch.fft.fftshift, (x34,)),
    "fft.fftfreq": (lambda x: x * torch.fft.fftfreq(4), (x34,)),
    "stft": (lambda x: torch.stft(x, 8, 4, window=torch.ones(8), return_complex=True).abs(), (torch.randn(1, 32),)),
    "complex mul": (
        lambda x: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(x)),
        (torch.randn(3, 2),),
    ),
    "polar": (lambda r, a: torch.view_as_real(torch.polar(r, a)), (pos, x34)),
    # nn
    **{
        f"F.{n}": (getattr(F, n), (x34,))
        for n in (
            "celu",
            "elu",
            "gelu",
            "glu",
            "hardshrink",
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "leaky_relu",
            "logsigmoid",
            "mish",
            "relu6",
            "rrelu",
            "selu",
            "silu",
            "softplus",
            "softshrink",
            "softsign",
            "tanhshrink",
            "normalize",
        )
    },
    "F.threshold": (lambda x: F.threshold(x, 0.1, 2.0), (x34,)),
    "F.prelu": (F.prelu, (x34, torch.rand(4))),
    "F.softmin": (lambda x: F.softmin(x, 1), (x34,)),
    "F.gumbel_softmax": (lambda x: F.gumbel_softmax(x).sum(-1), (x34,)),
    "F.cosine_similarity": (F.cosine_similarity, (x34, pos)),
    "F.pairwise_distance": (F.pairwise_distance, (x34, pos)),
    "F.pdist": (F.pdist, (x34,)),
    "F.local_response_norm": (lambda x: F.local_response_norm(x, 2), (img,)),
    "F.group_norm": (lambda x: F.group_norm(x, 2), (img,)),
    "F.rms_norm": (lambda x: F.rms_norm(x, [4]), (x34,)),
    "F.cross_entropy": (F.cross_entropy, (x34, target)),
    "F.nll_loss": (lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), (x34, target)),
    **{
        f"F.{n}": (getattr(F, n), (x34, pos))
        for n in (
            "mse_loss",
            "l1_loss",
            "smooth_l1_loss",
            "huber_loss",
            "kl_div",
            "poisson_nll_loss",
            "soft_margin_loss",
            "binary_cross_entropy_with_logits",
            "hinge_embedding_loss",
        )
    },
    "F.binary_cross_entropy": (lambda x, y: F.binary_cross_entropy(torch.sigmoid(x), torch.sigmoid(y)), (x34, pos)),
    "F.gaussian_nll_loss": (lambda x, y: F.gaussian_nll_loss(x, y, torch.ones(3, 4)), (x34, pos)),
    "F.ctc_loss": (lambda x: F.ctc_loss(x.log_softmax(-1)[:, None], torch.tensor([[1]]), [3], [1]), (x34,)),
    "F.triplet_margin_loss": (F.triplet_margin_loss, (x34, pos, pos + 1)),
    "F.margin_ranking_loss": (F.margin_ranking_loss, (v6, v6 + 1, torch.sign(v6))),
    "F.cosine_embedding_loss": (F.cosine_embedding_loss, (x34, pos, torch.tensor([1, -1, 1]))),
    "F.multi_margin_loss": (F.multi_margin_loss, (x34, target)),
    "F.multilabel_margin_loss": (F.multilabel_margin_loss, (x34, i34 % 4)),
    "F.adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (3, 3)), (img,)),
    "F.adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, (3, 3)), (img,)),
    "F.avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (seq,)),
    "F.max_pool1d": (lambda x: F.max_pool1d(x, 2), (seq,)),
    "F.max_pool3d": (lambda x: F.max_pool3d(x, 2), (torch.randn(1, 2, 4, 4, 4),)),
    "F.max_unpool2d": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), (img,)),
    "F.fractional_max_pool2d": (
        lambda x: F.fractional_max_pool2d(x, 2, 3, _random_samples=torch.full((1, 2, 2), 0.5)),
        (img,),
    ),
    "F.lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), (img.abs(),)),
    **{
        f"F.interpolate({m})": ((lambda m: lambda x: F.interpolate(x, size=(4, 11), mode=m))(m), (img,))
        for m in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    **{
        f"F.interpolate({m}, antialias)": (
            (lambda m: lambda x: F.interpolate(x, size=(3, 11), mode=m, antialias=True))(m),
            (img,),
        )
        for m in ("bilinear", "bicubic")
    },
    "F.interpolate(linear)": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (seq,)),
    "F.interpolate(nearest, 1d)": (lambda x: F.interpolate(x, scale_factor=2), (seq,)),
    "F.interpolate(trilinear)": (
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (torch.randn(1, 2, 3, 3, 3),),
    ),
    "F.interpolate(nearest, 3d)": (lambda x: F.interpolate(x, scale_factor=2), (torch.randn(1, 2, 3, 3, 3),)),
    "F.grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (img, torch.rand(1, 3, 3, 2))),
    "F.grid_sample(3d)": (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        (torch.randn(1, 2, 3, 3, 3), torch.rand(1, 2, 2, 2, 3)),
    ),
    "F.affine_grid": (lambda t: F.affine_grid(t, [1, 2, 4, 4], align_corners=False), (torch.randn(1, 2, 3),)),
    **{
        f"F.pad({m})": ((lambda m: lambda x: F.pad(x, (1, 2, 1, 1), mode=m))(m), (img,))
        for m in ("constant", "reflect", "replicate", "circular")
    },
    "F.scaled_dot_product_attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        (torch.randn(1, 2, 5, 8),),
    ),
    "F.multi_head_attention": (
        torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        tuple(torch.randn(1, 5, 8) for _ in range(3)),
    ),
    "nn.TransformerEncoderLayer": (
        torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
        (torch.randn(1, 5, 8),),
    ),
    "F.dropout": (lambda x: F.dropout(x, training=False), (x34,)),
    "F.conv_transpose2d": (lambda x: F.conv_transpose2d(x, torch.ones(2, 3, 3, 3), stride=2), (img,)),
    "F.bilinear": (lambda a, b: F.bilinear(a, b, torch.ones(5, 4, 4)), (x34, pos)),
    "F.linear": (lambda x: F.linear(x, torch.ones(5, 4)), (x34,)),
    # random: only the dtypes and shapes are compared
    "rand": (lambda x: torch.rand(3, 4) + 0 * x, (x34,)),
    "rand_like": (lambda x: torch.rand_like(x), (x34,)),
    "randn": (lambda x: torch.randn(3, 4) + 0 * x, (x34,)),
    "randn_like": (lambda x: torch.randn_like(x), (x34,)),
    "randint": (lambda x: torch.randint(0, 9, (3, 4)) + 0 * x, (i34,)),
    "randint_like": (lambda x: torch.randint_like(x, 9), (x34,)),
    "randperm": (lambda x: torch.randperm(6) + 0 * x, (v6,)),
    "normal": (lambda x: torch.normal(x, 1.0), (x34,)),
    "bernoulli": (lambda x: torch.bernoulli(torch.sigmoid(x)), (x34,)),
    "multinomial": (lambda x: torch.multinomial(x, 2), (pos,)),
    "F.dropout(training)": (lambda x: F.dropout(x, training=True), (x34,)),
}

RANDOM = {
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "F.gumbel_softmax",
    "F.dropout(training)",
}


class Call(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        result = self.function(*tensors)
        return tuple(result) if isinstance(result, (list, tuple)) else result


def problem(function, inputs, extensions: bool, compares_values: bool) -> str | None:
    """Return the reason if `function` is not delegated whole, fails or gives wrong results. Returns None otherwise."""
    model = Call(function).eval()
    partitioner = MLXPartitioner(legalize=("complex", "float64"), allow_extensions=extensions)
    try:
        with torch.no_grad():
            expected = model(*inputs)
            exported = torch.export.export(model, inputs)
    except Exception as error:
        return f"export: {_first_line(error)}"
    try:
        manager = to_edge_transform_and_lower(
            exported, partitioner=[partitioner], compile_config=EdgeCompileConfig(_check_ir_validity=False)
        )
    except Exception as error:
        return f"lowering: {type(error).__name__}: {_first_line(error)}"
    refused = partitioner.explain().refused
    if refused:
        return "; ".join(dict.fromkeys(f"{d.target}: {d.reason}" for d in refused))
    try:
        results = LoadedMethod(manager.to_executorch().buffer).execute(list(inputs))
    except Exception as error:
        return f"run: {_first_line(error)}"
    expected = torch.utils._pytree.tree_leaves(expected)
    for got, want in zip(results, expected, strict=True):
        if not isinstance(want, torch.Tensor):
            continue
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"got {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
        if compares_values and not torch.allclose(got, want, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"values differ by {(got.double() - want.double()).abs().max():.3g}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only these functions")
    parser.add_argument("--extensions", action="store_true", help="allow IR nodes that ExecuTorch's own delegate lacks")
    options = parser.parse_args()
    unknown = set(options.names) - set(FUNCTIONS)
    if unknown:
        parser.error(f"unknown functions: {', '.join(sorted(unknown))}")
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    names = options.names or list(FUNCTIONS)
    failures = 0
    for name in names:
        function, inputs = FUNCTIONS[name]
        with contextlib.redirect_stderr(io.StringIO()):
            reason = problem(function, inputs, options.extensions, name not in RANDOM)
        if reason is not None:
            failures += 1
            print(f"{name}: {reason}", flush=True)
    print(f"{len(names) - failures} of {len(names)} functions are delegated whole")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
