"""`bind_arguments`: the arguments of a call by the names in its schema."""

import pytest
import torch
from executorch_mlx.builder.bind import bind_arguments
from executorch_mlx.builder.registry import Unsupported

_LIBRARY = torch.library.Library("mlxbind", "FRAGMENT")
_LIBRARY.define("half(Tensor x, *, ScalarType dtype=half, ScalarType? other=None, int count=5) -> Tensor")
_LIBRARY.define("wide(Tensor x, ScalarType dtype=double) -> Tensor")


def call(target, **kwargs):
    graph = torch.fx.Graph()
    return graph.call_function(target, (graph.placeholder("x"),), kwargs)


def test_default_dtype_is_a_torch_dtype():
    bound = bind_arguments(call(torch.ops.mlxbind.half.default), str)
    assert bound == {"x": "x", "dtype": torch.float16, "other": None, "count": 5}


def test_given_dtype_is_unchanged():
    node = call(torch.ops.mlxbind.half.default, dtype=torch.int8, other=torch.bool)
    assert bind_arguments(node, str) == {"x": "x", "dtype": torch.int8, "other": torch.bool, "count": 5}


def test_unsupported_default_dtype_is_refused():
    with pytest.raises(
        Unsupported, match="dtype: the default of this operator is a dtype that some MLX devices do not"
    ):
        bind_arguments(call(torch.ops.mlxbind.wide.default), str)
    node = call(torch.ops.mlxbind.wide.default, dtype=torch.float32)
    assert bind_arguments(node, str)["dtype"] == torch.float32
