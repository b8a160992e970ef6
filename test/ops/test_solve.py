"""Matrix inverses, linear systems, determinants and Cholesky factors."""

import torch
from executorch_mlx import MLXPartitioner
from loaded_method import LoadedMethod
from oprows import Dyn, data, f32, floats, lower, pytest_function, row

LINALG = {"dtypes": (f32,), "loose": 20, "nodes": ["ScanNode"], "edge_verified": False, "signed_zero": False}
N = Dyn("n", 2, also=(1, 5))
# Elimination without pivoting fails for both matrices: its first pivot is 0 in PERMUTED, and tiny in TINY.
PERMUTED = data([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0], [1.0, 1.0, 0.0]])
TINY = data([[1e-8, 1.0], [1.0, 1.0]])


def regular(x):
    """Add 3 to the diagonal, which makes a nearly singular matrix unlikely."""
    return x + 3 * torch.eye(x.shape[-1])


def positive(x):
    """Return a positive definite matrix."""
    return x @ x.mT + torch.eye(x.shape[-1])


def of(function, matrix=regular):
    """Return a function that calls `function` with `matrix(x)` in place of its first argument `x`."""
    return lambda x, *rest: function(matrix(x), *rest)


def unchanged(x):
    return x


def sign_and_log(function):
    """Return a function that returns the sign and the logarithm as a plain tuple."""
    return lambda x: tuple(function(x))


aten = torch.ops.aten

ROWS = [
    row("linalg_inv", of(torch.linalg.inv), cases=[(floats(4, 4),), (floats(N, 3, 3),), (floats(1, 1),)], **LINALG),
    row("inverse", of(torch.inverse, unchanged), cases=[(PERMUTED,), (TINY,)], **LINALG),
    row(
        "linalg_solve",
        of(torch.linalg.solve),
        cases=[
            (floats(4, 4), floats(4, 2)),
            (floats(2, 3, 3), floats(3, 1)),
            (floats(3, 3), floats(3)),
            (floats(2, 3, 3), floats(2, 3)),
        ],
        **LINALG,
    ),
    row(
        "linalg_solve/right",
        lambda a, b: torch.linalg.solve(regular(a), b, left=False),
        floats(3, 3),
        floats(2, 3),
        **LINALG,
    ),
    row("linalg_det", of(torch.linalg.det), cases=[(floats(4, 4),), (floats(N, 3, 3),)], **LINALG),
    row(
        "det",
        of(torch.det, unchanged),
        cases=[(PERMUTED,), (TINY,), (data([[1.0, 2.0], [2.0, 4.0]]),), (floats(5, 5),)],
        **LINALG,
    ),
    row(
        "linalg_slogdet",
        of(sign_and_log(torch.linalg.slogdet), unchanged),
        cases=[(floats(2, 4, 4),), (PERMUTED,), (data([[0.0, 1.0], [0.0, 4.0]]),)],
        **LINALG,
    ),
    row("slogdet", of(sign_and_log(torch.slogdet), unchanged), floats(6, 6), **LINALG),
    row("logdet", of(torch.logdet, unchanged), cases=[(floats(3, 3),), (floats(4, 3, 3),)], **LINALG),
    row(
        "linalg_solve_triangular",
        lambda a, b: [
            torch.linalg.solve_triangular(regular(a), b, upper=upper, unitriangular=unit)
            for upper in (False, True)
            for unit in (False, True)
        ],
        floats(2, 4, 4),
        floats(4, 3),
        **LINALG,
    ),
    row(
        "linalg_solve_triangular/right",
        lambda a, b: [torch.linalg.solve_triangular(regular(a), b, upper=upper, left=False) for upper in (False, True)],
        floats(4, 4),
        floats(3, 4),
        **LINALG,
    ),
    row(
        "triangular_solve",
        lambda b, a: [
            tuple(torch.triangular_solve(b, regular(a), upper=upper, transpose=transpose))
            for upper in (False, True)
            for transpose in (False, True)
        ],
        floats(4, 2),
        floats(4, 4),
        **LINALG,
    ),
    row(
        "linalg_cholesky",
        lambda x: [torch.linalg.cholesky(positive(x), upper=upper) for upper in (False, True)],
        cases=[(floats(5, 5),), (floats(N, 3, 3),)],
        **LINALG,
    ),
    row("cholesky", of(torch.cholesky, positive), floats(4, 4), **LINALG),
    row(
        "cholesky_solve",
        lambda b, x: [
            torch.cholesky_solve(b, regular(x).tril()),
            torch.cholesky_solve(b, regular(x).triu(), upper=True),
        ],
        floats(4, 2),
        floats(4, 4),
        **LINALG,
    ),
    row("cholesky_inverse", lambda x: torch.cholesky_inverse(regular(x).tril()), floats(4, 4), **LINALG),
]

test_op_row = pytest_function(ROWS)


def test_a_singular_matrix_has_no_finite_inverse(delegate):
    singular = data([[1.0, 2.0], [2.0, 4.0]])
    lowered = lower(row("inverse/singular", lambda x: torch.inverse(x), cases=[(TINY,)], **LINALG))
    (result,) = LoadedMethod(lowered.pte).execute([singular.make(f32, 0, torch.Generator())])
    assert not result.isfinite().any()


def test_a_dynamic_matrix_size_is_declined():
    n = torch.export.Dim("n", min=2, max=8)

    class Determinant(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.det(x)

    partitioner = MLXPartitioner()
    exported = torch.export.export(Determinant(), (torch.eye(3),), dynamic_shapes=({0: n, 1: n},))
    partitioner.partition(exported)
    (declined,) = partitioner.explain().refused
    assert "a matrix of dynamic size" in declined.reason
