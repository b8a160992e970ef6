"""Matrix inverses, linear systems, determinants and Cholesky factors, as loops over the rows of the matrix.

The loops are `ScanNode`s: Gauss-Jordan elimination with partial pivoting, substitution, and the Cholesky-Crout
algorithm. torch raises an error for a singular matrix; here the result has infinities or NaN.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from .lib.loop import emit_loop

aten = torch.ops.aten


def _checked_size(matrix) -> int:
    """Return the number of rows of a square matrix. Expects a static size and float32, else raises `Unsupported`."""
    size = matrix.shape[-1]
    if not isinstance(size, int):
        raise Unsupported("a matrix of dynamic size is unsupported; make the last two dimensions static at export")
    if matrix.dtype != torch.float32:
        raise Unsupported(f"{matrix.dtype} is unsupported; use float32")
    return size


def _row_masks(P: Lowering, size):
    """Return, for each row k, the one-hot mask of k and the mask of the rows below k: two tensors [size, size]."""
    eye = torch.eye(size, dtype=torch.bool)
    return [P.constant("rows", eye), P.constant("rows_below", torch.ones(size, size, dtype=torch.bool).triu(1))]


# -- elimination ----------------------------------------------------------------


def _select(mask, rows):
    """Return the row of `rows` [..., n, m] that the one-hot mask [..., n] selects."""
    return torch.where(mask.unsqueeze(-1), rows, 0).sum(-2)


def _pivoted(rows, here, below):
    """Exchange row k with the row whose element in column k has the largest magnitude, among the rows k, k + 1, ….

    `here` and `below` are the two masks of row k, see `_row_masks`. Returns the rows, the pivot row, the pivot, and
    whether two different rows were exchanged.
    """
    size = here.shape[0]
    column = torch.where(here, rows[..., :size], 0).sum(-1)
    magnitude = torch.where(here | below, column.abs(), -1)
    chosen = torch.arange(size) == magnitude.argmax(-1, keepdim=True)
    pivot_row = _select(chosen, rows)
    exchanged = torch.where(chosen.unsqueeze(-1), _select(here.expand_as(chosen), rows).unsqueeze(-2), rows)
    rows = torch.where(here.unsqueeze(-1), pivot_row.unsqueeze(-2), exchanged)
    pivot = torch.where(here, pivot_row[..., :size], 0).sum(-1)
    return rows, pivot_row, pivot, ~(chosen & here).any(-1)


def _solve_step(rows, here, below):
    """Make the pivot row of column k row k, divide it by the pivot, and make column k zero in all other rows."""
    size = here.shape[0]
    rows, pivot_row, pivot, _ = _pivoted(rows, here, below)
    pivot_row = pivot_row / pivot.unsqueeze(-1)
    column = torch.where(here, rows[..., :size], 0).sum(-1, keepdim=True)
    eliminated = rows - column * pivot_row.unsqueeze(-2)
    return [torch.where(here.unsqueeze(-1), pivot_row.unsqueeze(-2), eliminated)]


def _eliminated(rows, here, below):
    """Exchange rows as `_pivoted` does, and make column k zero below row k.

    Returns the rows, the pivot, and the factor of the determinant: -1 if two rows were exchanged, else 1.
    """
    rows, pivot_row, pivot, moved = _pivoted(rows, here, below)
    column = torch.where(here, rows, 0).sum(-1)
    # If the pivot is 0, the column is 0 from row k on.
    factors = torch.where(below, column / torch.where(pivot == 0, 1, pivot).unsqueeze(-1), 0)
    return rows - factors.unsqueeze(-1) * pivot_row.unsqueeze(-2), pivot, torch.where(moved, -1.0, 1.0)


def _det_step(rows, det, here, below):
    rows, pivot, sign = _eliminated(rows, here, below)
    return [rows, det * pivot * sign]


def _slogdet_step(rows, sign, logarithm, here, below):
    rows, pivot, exchange = _eliminated(rows, here, below)
    return [rows, sign * torch.sign(pivot) * exchange, logarithm + torch.log(pivot.abs())]


def _solve(P: Lowering, matrix, right):
    size = _checked_size(matrix)
    (rows,) = P.trace(_augmented, matrix, right)
    (rows,) = emit_loop(P, _solve_step, [rows], _row_masks(P, size))
    return P.trace(lambda rows: rows[..., size:], rows)[0]


def _augmented(matrix, right):
    batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
    return torch.cat([matrix.expand(*batch, *matrix.shape[-2:]), right.expand(*batch, *right.shape[-2:])], -1)


def _one_per_matrix(P: Lowering, matrix, value):
    return P.trace(lambda m: torch.full(m.shape[:-2], value), matrix)[0]


@REGISTRY.lower(aten.linalg_inv.default, aten.inverse.default)
def inverse(P: Lowering, A=None, self=None):
    matrix = self if A is None else A
    return _solve(P, matrix, P.constant("eye", torch.eye(_checked_size(matrix))))


@REGISTRY.lower(aten.linalg_solve.default)
def solve(P: Lowering, A, B, left):
    is_vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and tuple(B.shape) == tuple(A.shape[:-1]))
    if is_vector:
        return P.trace(lambda x: x.squeeze(-1), _solve(P, A, P.trace(lambda b: b.unsqueeze(-1), B)[0]))[0]
    if left:
        return _solve(P, A, B)
    return P.trace(lambda x: x.mT, _solve(P, *P.trace(lambda a, b: [a.mT, b.mT], A, B)))[0]


@REGISTRY.lower(aten.linalg_det.default, aten.det.default)
def det(P: Lowering, A=None, self=None):
    matrix = self if A is None else A
    return emit_loop(P, _det_step, [matrix, _one_per_matrix(P, matrix, 1.0)], _row_masks(P, _checked_size(matrix)))[1]


@REGISTRY.lower(aten.linalg_slogdet.default, aten.slogdet.default)
def slogdet(P: Lowering, A=None, self=None):
    matrix = self if A is None else A
    start = [matrix, _one_per_matrix(P, matrix, 1.0), _one_per_matrix(P, matrix, 0.0)]
    return emit_loop(P, _slogdet_step, start, _row_masks(P, _checked_size(matrix)))[1:]


@REGISTRY.lower(aten.logdet.default)
def logdet(P: Lowering, self):
    return P.trace(_signed_logarithm, *slogdet(P, self))[0]


def _signed_logarithm(sign, logarithm):
    return torch.where(sign < 0, float("nan"), logarithm)


# -- triangular matrices --------------------------------------------------------


def _substitute(P: Lowering, matrix, right, upper, unit=False):
    """Solve a triangular system row by row: from the last row on if `upper`, else from the first."""
    size = _checked_size(matrix)
    rows = torch.eye(size, dtype=torch.bool)
    order = P.constant("rows", rows.flip(0) if upper else rows)

    def step(solution, here, matrix, right):
        row = _select(here, matrix)
        done = (row.unsqueeze(-2) @ solution).squeeze(-2)
        value = _select(here, right) - done
        if not unit:
            value = value / torch.where(here, row, 0).sum(-1, keepdim=True)
        return [torch.where(here.unsqueeze(-1), value.unsqueeze(-2), solution)]

    (start,) = P.trace(lambda m, r: _augmented(m, r)[..., size:] * 0, matrix, right)
    return emit_loop(P, step, [start], [order], matrix, right)[0]


def _transposed(P: Lowering, matrix):
    return P.trace(lambda m: m.mT, matrix)[0]


@REGISTRY.lower(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(P: Lowering, self, B, upper, left, unitriangular):
    if left:
        return _substitute(P, self, B, upper, unitriangular)
    matrix, right = (_transposed(P, x) for x in (self, B))
    return _transposed(P, _substitute(P, matrix, right, not upper, unitriangular))


@REGISTRY.lower(aten.triangular_solve.default)
def triangular_solve(P: Lowering, self, A, upper, transpose, unitriangular):
    matrix, is_upper = (_transposed(P, A), not upper) if transpose else (A, upper)
    (copy,) = P.trace(lambda a: a.clone(), A)
    return [_substitute(P, matrix, self, is_upper, unitriangular), copy]


@REGISTRY.lower(aten.cholesky_solve.default)
def cholesky_solve(P: Lowering, self, input2, upper):
    lower = _transposed(P, input2) if upper else input2
    return _substitute(P, _transposed(P, lower), _substitute(P, lower, self, False), True)


@REGISTRY.lower(aten.cholesky_inverse.default)
def cholesky_inverse(P: Lowering, self, upper):
    return cholesky_solve(P, P.constant("eye", torch.eye(_checked_size(self))), self, upper)


def _cholesky_step(factor, here, below, matrix):
    """Compute column k of the factor from the columns before it."""
    row = _select(here, factor)
    column = torch.where(here, matrix, 0).sum(-1) - (factor @ row.unsqueeze(-1)).squeeze(-1)
    root = torch.sqrt(torch.where(here, column, 0).sum(-1, keepdim=True))
    column = torch.where(here | below, column / root, 0)
    return [torch.where(here, column.unsqueeze(-1), factor)]


@REGISTRY.lower(aten.linalg_cholesky.default, aten.cholesky.default)
def cholesky(P: Lowering, self, upper):
    start = P.trace(torch.zeros_like, self)[0]
    if upper:
        # torch reads only the triangle that it returns.
        self = _transposed(P, self)
    (factor,) = emit_loop(P, _cholesky_step, [start], _row_masks(P, _checked_size(self)), self)
    return _transposed(P, factor) if upper else factor
