"""`executorch_mlx.gpu_kernels` without a GPU, and what `executorch-mlx doctor` prints about a GPU."""

import pytest
from executorch_mlx import gpu_kernels
from executorch_mlx.cli.doctor import _print_gpu_kernels
from executorch_mlx.gpu_kernels import Verdict


def test_a_cpu_has_no_kernels(delegate):
    assert gpu_kernels.verdicts() == []


@pytest.mark.parametrize("choices", ["sample", "sample=", "sample=yes", "no_kernel=on", "sample=on,,", "=on", "all"])
def test_invalid_choices_are_refused(delegate, choices, capfd):
    with pytest.raises(RuntimeError, match="choose: choices: got"):
        gpu_kernels.choose(choices)
    assert "expected all, sample, products," in capfd.readouterr().err


def test_doctor_prints_a_line_for_each_kernel(capsys):
    kernels = [
        Verdict("sample", "used", True, 0.0, 96.4, 1610.0, ""),
        Verdict("products", "slow", False, 0.00521, 30.0, 20.0, ""),
        Verdict("attention", "wrong", False, 0.7, 0.0, 0.0, ""),
        Verdict("norm_rope", "failed", False, 0.0, 0.0, 0.0, "no compiler"),
        Verdict("silu_product", "chosen", True, 0.0, 0.0, 0.0, ""),
    ]
    _print_gpu_kernels(kernels)
    assert capsys.readouterr().out.splitlines() == [
        "gpu kernels    sample             used     error 0, 96 us, without it 1,610 us",
        "               products           slow     error 0.005, 30 us, without it 20 us",
        "               attention          wrong    error 0.7",
        "               norm_rope          failed   no compiler",
        "               silu_product       chosen   on",
    ]
