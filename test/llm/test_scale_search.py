"""Quantization that minimizes an error: `scale_search`, `tuning`, `sensitivity`, and their use by `export_llm`."""

import platform

import pytest
import torch
import transformers as hf
from executorch_mlx.custom_ops.packing import FLOAT_MODES, dequantize, pack, quantize
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.packed import MLXLinear
from executorch_mlx.llm.export.quantization import native
from executorch_mlx.llm.export.quantization.calibration import Perplexity, Text
from executorch_mlx.llm.export.quantization.conversion import MIXED_BITS, convert_weights
from executorch_mlx.llm.export.quantization.scale_search import (
    Format,
    fit,
    fit_float,
    fit_range,
    integers,
    quantized,
    search,
)
from executorch_mlx.llm.export.quantization.sensitivity import FORMATS, choose
from executorch_mlx.llm.export.quantization.tuning import tuned
from small_llm import tokenizer

CONFIG = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1536,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)


def small_model():
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**CONFIG)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def squared_error(w, operands, format, importance=1.0):
    return ((dequantize(*operands, format.group_size, format.bits, format.mode) - w).square() * importance).sum()


@pytest.mark.parametrize("group_size, limit", [(32, 0.85), (64, 0.9), (128, 0.9)])
def test_fitted_scales_have_a_smaller_error_than_scales_from_the_range(group_size, limit):
    w, format = normal(64, 256), Format(4, group_size)
    error = squared_error(w, fit(w, 4, group_size), format)
    assert error < limit * squared_error(w, quantize(w, 4, group_size), format)


needs_native = pytest.mark.skipif(
    native.quantize(torch.ones(1, 32), 4, 32, torch.float32, searches=True) is None or platform.machine() != "x86_64",
    reason="the library is not built, or torch sums in another order",
)


def weight_of_many_sizes():
    w = normal(37, 640) * torch.logspace(-8, 4, 37).unsqueeze(-1)  # also scales below and above the range of float16
    w[3], w[4], w[5, :40], w[6] = 0, 1e-9, 100, 7
    w[7], w[8] = w[7].abs() + 50, -w[8].abs() - 50  # ranges without 0
    w[9, ::2] = 100.00001  # steps of the smallest size
    return w


@needs_native
@pytest.mark.parametrize("group_size", (32, 64, 128))
@pytest.mark.parametrize("bits", (2, 3, 4, 5, 6, 8))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize("is_weighted", (False, True))
def test_native_search_has_the_bits_of_torch(group_size, bits, dtype, is_weighted):
    w = weight_of_many_sizes()
    x = w.unflatten(-1, (-1, group_size))
    importance = normal(640, seed=1).square().add(0.01) if is_weighted else None
    groups = importance.unflatten(-1, (-1, group_size)) if is_weighted else None
    scales, biases = search(x, bits, dtype, groups)
    expected = pack(integers(x, scales, biases, bits).to(torch.uint8).flatten(-2), bits), scales, biases
    for got, wanted in zip(
        native.quantize(w, bits, group_size, dtype, importance, searches=True), expected, strict=True
    ):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)


@needs_native
@pytest.mark.parametrize("group_size", (32, 64, 128))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_native_ranges_have_the_bits_of_torch(group_size, dtype):
    w = weight_of_many_sizes()
    expected = fit_range(w, 8, group_size, dtype)
    found = native.quantize(w, 8, group_size, dtype, searches=False)
    for got, wanted in zip(found, expected, strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    is_symmetric = expected[2] == -128 * expected[1]
    assert is_symmetric.any() and not is_symmetric.all()


@needs_native
@pytest.mark.parametrize("searches", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_native_quantization_reads_half_precision(dtype, searches):
    w = weight_of_many_sizes().to(dtype)
    results = [native.quantize(x, 8, 64, torch.float16, searches=searches) for x in (w, w.float())]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_native
@pytest.mark.parametrize("weight", (float("nan"), float("inf"), -1e19))
def test_native_search_leaves_extreme_weights_to_torch(weight):
    w = normal(40, 64)
    w[39, 63] = weight
    assert native.quantize(w, 4, 32, torch.float32, searches=True) is None
    packed, scales, biases = fit(w, 4, 32)
    first = fit(w[:39], 4, 32)
    assert (
        torch.equal(packed[:39], first[0]) and torch.equal(scales[:39], first[1]) and torch.equal(biases[:39], first[2])
    )


@needs_native
def test_native_ranges_leave_scales_that_overflow_to_torch():
    w = normal(8, 64) * 1e9
    assert native.quantize(w, 8, 32, torch.float16, searches=False) is None
    assert native.quantize(w, 8, 32, torch.bfloat16, searches=False) is not None


@needs_native
@pytest.mark.parametrize("bits", (4, 8))
def test_a_transposed_weight_is_quantized_like_its_copy(bits):
    w = normal(64, 48).mT
    for got, wanted in zip(*(quantized(x, Format(bits, 64), torch.float16) for x in (w, w.contiguous())), strict=True):
        assert torch.equal(got, wanted)


def test_values_on_a_grid_of_4_bits_are_nearly_exact():
    q = torch.randint(0, 16, (64, 8, 32), generator=torch.Generator().manual_seed(0))
    q[..., 0], q[..., 1] = 0, 15
    grid = (q * 0.0625 - 0.4).flatten(-2)
    torch.testing.assert_close(dequantize(*fit(grid, 4, 32, torch.float16), 32, 4), grid, rtol=2e-3, atol=2e-3)


def test_constant_groups_and_outliers():
    w = torch.zeros(4, 64)
    w[1] = 3.0
    w[2, 5] = 100.0
    w[3] = 1e-9
    for operands, format in ((fit(w, 4, 64), Format(4, 64)), (fit(w, 8, 32), Format(8, 32))):
        values = dequantize(*operands, format.group_size, format.bits)
        torch.testing.assert_close(values, w, rtol=1e-3, atol=1e-6)


def test_importance_moves_the_error_to_other_columns():
    w, importance = normal(64, 64), torch.ones(64)
    importance[:8] = 100
    with_, without = fit(w, 4, 64, importance=importance), fit(w, 4, 64)
    assert squared_error(w, with_, Format(4, 64), importance) < 0.8 * squared_error(
        w, without, Format(4, 64), importance
    )


@pytest.mark.parametrize("mode, limit", [("mxfp4", 0.12), ("nvfp4", 0.1), ("mxfp8", 0.03)])
@pytest.mark.parametrize("scale", (1.0, 40.0))
def test_float_modes(mode, limit, scale):
    w = normal(32, 128) * scale
    w[0] = 0
    format = Format.of(mode)
    packed, scales, biases = fit_float(w, mode)
    assert packed.dtype == torch.uint32 and scales.dtype == torch.uint8 and biases is None
    assert squared_error(w, (packed, scales, biases), format).sqrt() < limit * w.norm()


def test_tuning_lowers_the_error_of_the_product():
    x = normal(512, 64) @ normal(64, 64, seed=1)  # correlated inputs
    w = normal(48, 64, seed=2)
    moments = x.mT @ x / len(x)
    products = []
    for operands in (tuned(w, moments, 4, 64, torch.float16), fit(w, 4, 64, torch.float16, moments.diagonal())):
        products.append((x @ (dequantize(*operands, 64, 4) - w).mT).norm())
    assert products[0] < 0.85 * products[1]


def test_the_largest_effects_get_the_wider_formats():
    effects = {"a": [1.0, 0.5, 0.01], "b": [100.0, 60.0, 1.0], "c": [float("inf"), 0.5, float("inf")]}
    sizes = {"a": 1000, "b": 1000, "c": 1000}
    chosen = choose(effects, sizes, 6.0)
    assert chosen == {"a": FORMATS[0], "b": FORMATS[2], "c": FORMATS[1]}
    assert set(choose(effects, sizes, 4.7).values()) <= {FORMATS[0], FORMATS[1]}


def converted(quantize, **options):
    model = small_model()
    names = []
    options = dict(tokenizer=tokenizer(), calibrate=None, progress=names.append) | options
    return model, convert_weights(model, quantize, None, torch.float32, **options)


def linear_layers(model):
    return [m for n, m in model.named_modules() if isinstance(m, MLXLinear) and n != "lm_head"]


@pytest.mark.parametrize("quantize", ["int4", "int8", "mixed", *FLOAT_MODES])
def test_every_quantization_keeps_embedding_and_head_at_8_bits(quantize):
    model, conversion = converted(quantize)
    assert model.model.embed_tokens.bits == model.lm_head.bits == 8
    assert model.lm_head.words is model.model.embed_tokens.words
    layers = linear_layers(model)
    assert len(layers) == 21 and {layer.mode for layer in layers} == {quantize if quantize in FLOAT_MODES else "affine"}
    assert 0.8 < conversion.perplexity.ratio < 1.3
    if quantize == "mixed":
        sizes = [layer.in_features * layer.out_features for layer in layers]
        bits = [Format(layer.bits, layer.group_size).bits_per_weight * size for layer, size in zip(layers, sizes)]
        assert sum(bits) / sum(sizes) <= MIXED_BITS
        assert len({(layer.bits, layer.group_size) for layer in layers}) > 1


def test_the_perplexity_is_also_measured_with_int8_activations():
    model, conversion = converted("int4", activations="int8")
    perplexity = conversion.perplexity
    assert perplexity.int8 != perplexity.after and 0.98 < perplexity.int8 / perplexity.after < 1.02
    line = f"{perplexity.int8:.2f} with activations in 8 bits: {perplexity.int8 / perplexity.before:.3f} times"
    assert line in str(perplexity)
    assert not any(layer.int8_activations for layer in linear_layers(model))


def test_a_text_file_tunes_the_layers(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Return the number of elements of the list. " * 100)
    tuned_model, conversion = converted("int4", calibrate=text)
    plain, _ = converted("int4")
    assert conversion.perplexity.text == "text.txt"
    first, second = (m.model.layers[1].mlp.down_proj for m in (tuned_model, plain))
    assert first.bits == 4 and not first.words.equal(second.words)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_half_precision_weights_are_measured_in_float32(dtype):
    model = small_model().to(dtype)
    conversion = convert_weights(
        model, "int4", 64, torch.float32, tokenizer=tokenizer(), calibrate=None, progress=lambda _: None
    )
    assert 0.8 < conversion.perplexity.ratio < 1.3
    assert model.model.norm.weight.dtype == torch.float32 and linear_layers(model)[0].scales.dtype == torch.float16


def test_the_text_is_split_into_calibration_and_held_out():
    text = Text.read(tokenizer(), None, CONFIG["vocab_size"])
    assert text.calibration.shape == (4, 512) and text.held_out.shape == (2, 512)
    assert not any(row.equal(other) for row in text.calibration for other in text.held_out)


def test_a_short_text_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(ValueError, match="calibrate: text.txt: got .* tokens, expected at least 48"):
        Text.read(tokenizer(), tmp_path / "text.txt", CONFIG["vocab_size"])


def test_a_rise_of_the_perplexity_is_a_warning():
    assert "warning: it rises by more than 10%" in str(Perplexity(10, 11.5, "text", 100))
    assert "warning" not in str(Perplexity(10, 10.9, "text", 100))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(quantize="int3"), "quantize: got int3, expected none, int4"),
        (dict(quantize="mixed", group_size=32), "group_size: got 32 with mixed"),
        (dict(quantize="mixed"), "quantize: got mixed without a tokenizer"),
        (dict(calibrate="text.txt"), "calibrate: got text.txt with none, expected quantize int4"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        export_llm(small_model(), **arguments)


def test_quantized_keeps_the_leading_dimensions():
    w = normal(3, 8, 64)
    q, scales, biases = quantized(w, Format(4, 32), torch.float16)
    assert q.shape == (3, 8, 8) and scales.shape == biases.shape == (3, 8, 2) and scales.dtype == torch.float16
