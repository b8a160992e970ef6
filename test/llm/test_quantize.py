"""Quantization of a model's weights into MLX's packed format."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from executorch_mlx.custom_ops.packing import dequantize, quantize
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from executorch_mlx.llm.export.packed import MLXEmbedding, MLXLinear, arbitrary_products
from executorch_mlx.llm.export.quantization.conversion import convert_weights
from executorch_mlx.llm.export.quantize import quantize_model
from executorch_mlx.llm.export.weights import load_causal_lm
from executorch_mlx.serialization.read import read_payload
from torchao.quantization import Float8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerGroup

SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=200,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
)
PROMPT, STEPS = [5, 17, 100, 3, 77, 9], 40


def small_model(model_class=hf.LlamaForCausalLM, config_class=hf.LlamaConfig, **changes):
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL | changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def test_arbitrary_products_read_no_packed_weight():
    model = small_model(hf.Qwen2ForCausalLM, hf.Qwen2Config)
    quantize_model(model, 4, 32)
    projection = model.model.layers[0].self_attn.q_proj
    projection.bias.data.fill_(0.5)
    projection.scales.data.fill_(float("nan"))
    x = torch.arange(1.0, 65).expand(1, 3, 64)
    with torch.no_grad(), arbitrary_products(model):
        y = projection(x)
        assert y.shape == (1, 3, 64) and y.isfinite().all() and y[0, 0].unique().numel() == 64
        assert torch.equal(y[0, 0, :1], torch.tensor([1.5]))
    with torch.no_grad():
        assert projection(x).isnan().all()


def dequantized(model):
    """The quantized weights of `model` as float32, as a state dict."""
    return {f"{n}.weight": m.dequantized() for n, m in model.named_modules() if hasattr(m, "dequantized")}


QUANTIZE_WITH_MLX = """
import json, sys, mlx.core as mx
w = mx.random.normal((16, 256), key=mx.random.key(0))
w[0] = 0
w[1, :64] = 3
operands = {"w": w}
for bits, group in json.loads(sys.argv[2]):
    for name, t in zip(("weight", "scales", "biases"), mx.quantize(w, group, bits)):
        operands[f"{bits}.{group}.{name}"] = t
mx.save_safetensors(sys.argv[1], operands)
"""


def test_packed_weights_equal_those_of_mlx(tmp_path):
    from safetensors.torch import load_file

    path = tmp_path / "mlx.safetensors"
    formats = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
    subprocess.run([sys.executable, "-c", QUANTIZE_WITH_MLX, path, json.dumps(formats)], check=True)
    expected = load_file(path)
    for bits, group in formats:
        packed, *rest = quantize(expected["w"], bits, group)
        assert packed.view(torch.int32).equal(expected[f"{bits}.{group}.weight"].view(torch.int32))
        for name, t in zip(("scales", "biases"), rest):
            assert t.equal(expected[f"{bits}.{group}.{name}"])


@pytest.mark.parametrize("bits, tolerance", [(4, 0.1), (8, 6e-3)])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_quantization_error_is_small(bits, tolerance, dtype):
    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    rounded = dequantize(*quantize(w, bits, 64), 64, bits)
    assert 0 < (rounded - w.float()).norm() < tolerance * w.float().norm()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_after_a_quantization_no_page_of_the_checkpoint_is_kept(tmp_path):
    small_model().save_pretrained(tmp_path)
    model = load_causal_lm(tmp_path)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    convert_weights(model, "int4", 32, torch.float32, tokenizer=None, calibrate=None, progress=lambda step: None)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    model(torch.tensor([PROMPT]))


def test_fp8_weights_of_torchao_become_floats():
    model = small_model()
    quantize_(model, Float8WeightOnlyConfig())
    expected = model(torch.tensor([PROMPT])).logits
    convert_weights(model, "none", None, torch.float32, tokenizer=None, calibrate=None, progress=lambda step: None)
    assert {type(parameter.data) for parameter in model.parameters()} == {torch.Tensor}
    torch.testing.assert_close(model(torch.tensor([PROMPT])).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", (False, True))
def test_quantized_model_computes_with_the_dequantized_weights(tied):
    model, reference = small_model(tie_word_embeddings=tied), small_model(tie_word_embeddings=tied)
    assert quantize_model(model, 4, 64) == []
    assert isinstance(model.lm_head, MLXLinear) and isinstance(model.model.embed_tokens, MLXEmbedding)
    assert (model.lm_head.words is model.model.embed_tokens.words) == tied
    assert model.model.layers[0].mlp.down_proj.group_size == 32  # 64 does not divide 96
    reference.load_state_dict(dequantized(model), strict=False)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, reference(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_of_an_embedding_has_the_precision_of_the_model(dtype):
    """Gemma multiplies embeddings by the root of their size. The scales of the weights are in half precision."""
    model = small_model(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, hidden_size=96, num_hidden_layers=1)
    convert_weights(model, "int8", 32, dtype, tokenizer=None, calibrate=None, progress=lambda step: None)
    embedding = model.get_input_embeddings()
    assert embedding.scales.dtype.itemsize == 2 and embedding.factor.dtype == dtype
    assert embedding.factor == torch.tensor(96**0.5).to(dtype)


def test_conv1d_layers_are_quantized():
    """GPT-2 has linear layers of a class of its own, whose weights are transposed."""
    config = hf.GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=1, n_head=4)
    torch.manual_seed(0)
    model, tokens = hf.GPT2LMHeadModel(config).eval(), torch.arange(8)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        assert quantize_model(model, 8, 32) == []
        assert (model(tokens).logits - expected).norm() < 0.02 * expected.norm()
    assert isinstance(model.transformer.h[0].attn.c_attn, MLXLinear)


def test_without_embedding_a_tied_head_stays_unquantized():
    model = small_model(tie_word_embeddings=True)
    quantize_model(model, 8, 32, embedding=False)
    assert isinstance(model.model.layers[0].self_attn.q_proj, MLXLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.lm_head) is torch.nn.Linear


def test_a_layer_that_no_group_size_divides_stays_unquantized():
    model = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.Linear(40, 64))
    assert quantize_model(model, 4) == ["1"]
    assert isinstance(model[0], MLXLinear) and type(model[1]) is torch.nn.Linear


def test_an_embedding_that_scales_its_result_keeps_the_scale():
    model = small_model(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        quantize_model(model, 8, 32)
        rows = model.model.embed_tokens(tokens)
    expected = model.model.embed_tokens.dequantized()[tokens] * 8.0  # the square root of the hidden size
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("argument", [{"bits": 3}, {"bits": 4, "group_size": 16}])
def test_an_unknown_format_is_refused(argument):
    with pytest.raises(ValueError, match="quantize_model: (bits: got 3|group_size: got 16), expected one of"):
        quantize_model(torch.nn.Linear(64, 64), **argument)


def with_torchao(model):
    config = IntxWeightOnlyConfig(torch.int4, PerGroup(32))
    quantize_(model, config, lambda module, name: isinstance(module, (torch.nn.Linear, torch.nn.Embedding)))
    return model


def with_quantize_model(model):
    quantize_model(model, 4, 32)
    return model


@pytest.mark.parametrize("quantized", (with_quantize_model, with_torchao), ids=lambda f: f.__name__)
def test_greedy_equals_the_eager_model(quantized, tmp_path):
    prompt = torch.tensor([PROMPT])
    tokens = quantized(small_model(num_hidden_layers=1)).generate(prompt, do_sample=False, max_new_tokens=STEPS)
    expected = tokens[0, len(PROMPT) :].tolist()
    exported = export_llm(quantized(small_model(num_hidden_layers=1)), head=HeadConfig.minimal(), speculation=False)
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    tokens = LLM.load(tmp_path / "model.pte").generate(PROMPT, max_new_tokens=STEPS).result().tokens
    assert len(set(expected)) > 5 and tokens == expected


@pytest.mark.parametrize("allow_extensions", [True, False])
def test_int8_activations(allow_extensions, tmp_path):
    """`save` compares the program with eager torch, which rounds the activations too."""
    exported = export_llm(
        small_model(num_hidden_layers=1),
        quantize="int8",
        activations="int8",
        allow_extensions=allow_extensions,
        head=HeadConfig.minimal(),
        speculation=False,
    )
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    assert exported.check.ok
    payloads = [read_payload(bytes(data.data)) for data in exported.program.executorch_program.backend_delegate_data]
    nodes = {type(i.op).__name__ for p in payloads for chain in p.instruction_chains for i in chain.instructions}
    assert ("Int8QuantizedMatmulNode" in nodes) == allow_extensions
    assert ("QuantizedMatmulNode" in nodes) != allow_extensions
    assert len(LLM.load(tmp_path / "model.pte").generate(PROMPT, max_new_tokens=5).result().tokens) == 5


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_a_loaded_model_computes_in_its_dtype_after_quantization(quantize, tmp_path):
    """The scales are float16. The embedding still returns float32, which GPT-2's unquantized layers expect."""
    config = dict(n_embd=64, n_layer=1, n_head=4, n_positions=64, vocab_size=256, bos_token_id=0, eos_token_id=None)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**config)).eval()
    exported = export_llm(model, quantize=quantize, head=HeadConfig.minimal(), speculation=False)
    assert exported.report.refused == ()
    assert (
        model.transformer.wte.scales.dtype == torch.float16
        and model(torch.tensor([PROMPT])).logits.dtype == torch.float32
    )
    exported.save(tmp_path / "model.pte")
    assert exported.check.ok


def test_int8_activations_need_quantized_weights():
    with pytest.raises(ValueError, match="activations: got int8, expected linear layers with affine weights"):
        export_llm(small_model(), activations="int8", verify=False)
