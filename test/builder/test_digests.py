"""Digests identify the constants of a program by dtype, shape and content."""

import hashlib

import pytest
import torch
from executorch_mlx.builder.digests import Digests


def expected(tensor):
    content = f"{tensor.dtype}{tuple(tensor.shape)}".encode() + bytes(tensor.view(torch.uint8).flatten().tolist())
    return hashlib.sha256(content).hexdigest()[:16]


@pytest.mark.parametrize(
    "tensor, is_zero",
    [
        (torch.arange(6.0).reshape(2, 3), False),
        (torch.zeros(3, 50), True),
        (torch.zeros(3, 50, dtype=torch.bfloat16), True),
        (torch.zeros(7, dtype=torch.uint8), True),
        (torch.zeros(1000).index_fill(0, torch.tensor([999]), 1), False),
        (torch.zeros(203, dtype=torch.uint8).index_fill(0, torch.tensor([202]), 1), False),
        (torch.full((40,), -0.0), False),
        (torch.zeros(0, 4), True),
    ],
)
def test_digest(tensor, is_zero):
    digest = Digests([tensor]).of(tensor)
    assert (digest.text, digest.is_zero) == (expected(tensor), is_zero)


def test_kinds_of_zeros_differ():
    kinds = [torch.zeros(4, 6), torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.int32)]
    digests = Digests()
    assert [digests.of(zeros).text for zeros in kinds] == [expected(zeros) for zeros in kinds]


def test_views_of_lasting_memory_differ():
    memory = torch.arange(8.0)
    digests = Digests([memory])
    views = [memory, memory[:4], memory[4:], memory.view(torch.int32), memory.reshape(2, 4), memory]
    assert [digests.of(view).text for view in views] == [expected(view) for view in views]


def test_other_memory_may_change():
    memory = torch.arange(8.0)
    digests = Digests()
    first = digests.of(memory).text
    memory.add_(1)
    assert digests.of(memory).text == expected(memory) != first
