"""Trials of the kernels for GPUs: a right kernel is used, a wrong one and a slow one are not. Needs no GPU.

The program `kernel_trials` compiles the sources of the kernels for CUDA and Metal as C++, and runs them on the CPU. The
times of kernels on a CPU mean nothing, so their races count steps of threads in place of microseconds.
"""

import pytest

CUDA = [
    "sample",
    "products",
    "quantized_products",
    "dequantize",
    "attention",
    "norm_rope",
    "silu_product",
    "add_rms_norm",
    "embedding",
]
METAL = ["sample", "products", "quantized_products", "norm_rope"]
# platform, kernel, function, and a change of its source that makes the results wrong
WRONG = [
    ("cuda", "sample", "sample_parts", "0x1BD11BDAu", "0x1BD11BDBu"),
    ("cuda", "products", "gated_products", "silu * products[1]", "silu * products[0]"),
    ("cuda", "quantized_products", "quantized_gated_products", "silu * products[1]", "silu * products[0]"),
    ("cuda", "quantized_products", "quantized_product_and_sum", "go_on();", ""),
    ("cuda", "quantized_products", "quantized_products_of_row_2", "MinusBases = kIs", "MinusBases = !kIs"),
    ("cuda", "dequantize", "dequantize", "+ bias[i]", "+ bias[0]"),
    ("cuda", "attention", "attention_step", "copy(own_key, keys);", ""),
    ("cuda", "attention", "attention_step", "weights += factor", "weights += 1.1f * factor"),
    ("cuda", "norm_rope", "norm_rope_2", "a * cosines[pair] - b * sines[pair]", "a * cosines[pair]"),
    ("cuda", "silu_product", "silu_multiply", "1.0f + expf(-x)", "1.0f + expf(x)"),
    ("cuda", "add_rms_norm", "add_rms_norm", "/ size +", "/ (2 * size) +"),
    ("cuda", "embedding", "embedding", "bounded + rows", "bounded"),
    ("cuda", "embedding", "quantized_embedding", "scale * static_cast", "bias * static_cast"),
    ("metal", "products", "product", "sum += x[i]", "sum -= x[i]"),
    ("metal", "products", "gated_products", "silu * products1[r]", "silu * products0[r]"),
    ("metal", "products", "product_and_sum", "added[first + r]", "added[first]"),
    ("metal", "quantized_products", "quantized_product", "* total;", "* 0.5f * total;"),
    ("metal", "norm_rope", "norm_rope_2", "a * sine + b * cosine", "b * cosine"),
    ("metal", "sample", "sample_rows", "rank < count ? drop_of(keys[rank])", "rank < count ? drop_of(keys[0])"),
]


@pytest.mark.parametrize("platform, kernels", [("cuda", CUDA), ("metal", METAL)])
def test_right_kernels_are_used(hold, platform, kernels):
    trials = hold(platform)
    assert {name: line.verdict for name, line in trials.kernels.items()} == dict.fromkeys(kernels, "used")
    assert all(line.is_used for line in trials.kernels.values())
    assert trials.kernels["sample"].error == 0


@pytest.mark.parametrize("platform, kernel, function, right, wrong", WRONG)
def test_a_wrong_kernel_is_not_used(hold, platform, kernel, function, right, wrong):
    line = hold(platform, "--only", kernel, "--edit", function, right, wrong).kernels[kernel]
    assert line.verdict == "wrong"
    assert not line.is_used
    assert line.error > 0


@pytest.mark.parametrize("platform", ["cuda", "metal"])
def test_a_slow_kernel_is_not_used(hold, platform):
    work = 200_000  # more than that of the kernel, and less than that of a kernel with the loop
    assert hold(platform, "--only", "sample", "--time-without", work).kernels["sample"].is_used
    slower = "for (int i = 0; i < 100; ++i) { GPU_BARRIER(); } GPU_GROUP_MEMORY float values"
    loop = ("--edit", "sample_parts", "GPU_GROUP_MEMORY float values", slower)
    line = hold(platform, "--only", "sample", "--time-without", work, *loop).kernels["sample"]
    assert (line.verdict, line.is_used) == ("slow", False)


def test_a_kernel_that_does_not_compile_is_not_used(hold):
    line = hold(
        "metal", "--only", "sample", "--edit", "sample_rows", "all_keys, tokens);", "all_keys, missing);"
    ).kernels["sample"]
    assert (line.verdict, line.is_used, line.reason) == ("failed", False, "a kernel does not compile")


def test_the_net_without_kernels(hold):
    """Measured times that differ by 50 ms, errors below and above the tolerance, NaN, and an exception."""
    kernels = hold("net").kernels
    verdicts = {name: line.verdict for name, line in kernels.items()}
    wrong = dict.fromkeys(["products", "norm_rope", "silu_product"], "wrong")
    assert verdicts == wrong | {"sample": "used", "quantized_products": "slow", "attention": "failed"}
    assert kernels["attention"].reason == "no compiler"
    assert [name for name, line in kernels.items() if line.is_used] == ["sample"]


def test_choices_take_the_place_of_trials(hold):
    trials = hold("net", "--choose", "all=off,quantized_products=on,attention=on")
    used = [name for name, line in trials.kernels.items() if line.is_used]
    assert used == ["quantized_products", "attention"]
    assert trials.held == 0
    assert hold("net", "--choose", "sample=off").kernels["sample"].verdict == "chosen"
