"""For the test cases of every IR node, the inspector infers the types that the results have."""

import pytest
from executorch_mlx.serialization.infer_types import infer_types
from executorch_mlx.serialization.types import Type
from irprograms.node_case import build, inputs_and_outputs
from irprograms.node_cases import CASES


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{n}-{CASES[n].node.NAME}")
def test_inferred_types_match_results(number):
    case = CASES[number]
    for dtype in case.dtypes:
        inputs, outputs = inputs_and_outputs(case, dtype)
        (typed,) = infer_types(build(case, inputs, outputs).graph())
        inferred = list(typed.inferred.values())
        expected = [Type(tuple(o.shape), str(o.dtype).removeprefix("torch.")) for o in outputs]
        assert [t.shape for t in inferred] == [e.shape for e in expected]
        # With operands of different dtypes, the inferred dtype may be unknown.
        for t, e in zip(inferred, expected, strict=True):
            assert t.dtype in (None, e.dtype)
