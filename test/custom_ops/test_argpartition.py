"""mlx::argpartition in eager torch."""

import executorch_mlx.custom_ops  # noqa: F401
import pytest
import torch


@pytest.mark.parametrize("kth", [0, 3, 9, 49])
@pytest.mark.parametrize("axis", [-1, 0])
def test_smaller_values_come_first(kth, axis):
    x = torch.randn(50, 50).round(decimals=1)  # with ties
    order = torch.ops.mlx.argpartition(x, kth, axis)
    y = x.gather(axis, order).movedim(axis, -1)
    assert order.sort(dim=axis).values.movedim(axis, -1).eq(torch.arange(50)).all()
    pivot = x.sort(dim=axis).values.movedim(axis, -1)[..., kth : kth + 1]
    assert y[..., kth : kth + 1].equal(pivot)
    assert (y[..., :kth] <= pivot).all() and (y[..., kth:] >= pivot).all()
