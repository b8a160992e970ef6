"""Mixtures of experts that read only the chosen experts, against transformers."""

import pytest
import torch
import transformers as hf
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.packed import MLXExperts, packable_weights
from executorch_mlx.llm.export.quantize import quantize_model
from executorch_mlx.serialization.read import read_payload
from loaded_method import LoadedMethod
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

SMALL = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=100,
    num_experts_per_tok=2,
)
FAMILIES = {
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, dict(num_local_experts=4)),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, dict(num_experts=5, moe_intermediate_size=32)),
    # Some experts only return their input.
    "longcat": (
        hf.LongcatFlashForCausalLM,
        hf.LongcatFlashConfig,
        dict(
            num_layers=1,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=10,
            head_dim=8,
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
            expert_ffn_hidden_size=32,
            ffn_hidden_size=64,
        ),
    ),
    # These do not use the experts interface of transformers.
    "jetmoe": (hf.JetMoeForCausalLM, hf.JetMoeConfig, dict(kv_channels=16, num_local_experts=4)),
    "dbrx": (
        hf.DbrxForCausalLM,
        hf.DbrxConfig,
        dict(
            d_model=64,
            head_dim=32,
            n_heads=2,
            n_layers=1,
            max_seq_len=64,
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=1e4),
            ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2),
        ),
    ),
}
TOKENS = torch.tensor([[5, 17, 99, 3, 77, 9, 8, 1, 5]])


def small_model(name):
    torch.manual_seed(0)
    model_class, config_class, changes = FAMILIES[name]
    model = model_class(config_class(**SMALL | changes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    model.set_experts_implementation("eager")
    return model


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_eager_equals_transformers(name, dtype):
    model = small_model(name).to(dtype)
    with torch.no_grad():
        expected = model(TOKENS).logits
        actual = use_gathered_experts(model)(TOKENS).logits
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_experts_that_run_in_a_loop_keep_their_own_gate():
    torch.manual_seed(0)
    config = hf.Step3p7TextConfig(hidden_size=16, moe_intermediate_size=24)
    config.num_local_experts = 4
    mixture = torch.nn.Module()
    mixture.experts = Step3p7Experts(config, swiglu_limit=0.1)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter)
    x, index, weights = torch.randn(5, 16), torch.randint(4, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        expected = mixture.experts(x, index, weights)
        use_gathered_experts(mixture)
        assert len(packable_weights(mixture.experts)) == 2
        torch.testing.assert_close(mixture.experts(x, index, weights), expected)


def test_a_model_without_experts_stays_unchanged():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "num_experts_per_tok": None}))
    before = model.config._experts_implementation
    assert use_gathered_experts(model) is model
    assert model.config._experts_implementation == before


@pytest.mark.parametrize("name, count", [("mixtral", 2), ("jetmoe", 4), ("dbrx", 3)])
def test_quantized_experts_compute_with_the_dequantized_weights(name, count):
    model, dequantized = use_gathered_experts(small_model(name)), use_gathered_experts(small_model(name))
    assert quantize_model(model, 4, 32) == []
    assert sum(isinstance(module, MLXExperts) for module in model.modules()) == count
    for path, module in model.named_modules():
        if hasattr(module, "dequantized"):
            weight = dequantized.get_parameter(path if isinstance(module, MLXExperts) else f"{path}.weight")
            weight.data = module.dequantized()
    with torch.no_grad():
        actual, expected = use_gathered_experts(model)(TOKENS).logits, dequantized(TOKENS).logits
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("name, bits", [("mixtral", None), ("qwen3_moe", 8)])
def test_lowered_model_equals_eager(delegate, name, bits):
    model = small_model(name)
    if bits:
        quantize_model(model, bits, 32)
    model = Logits(use_gathered_experts(model))
    length = torch.export.Dim("length", min=1, max=16)
    exported = torch.export.export(model, (TOKENS,), dynamic_shapes=({1: length},))
    partitioner = MLXPartitioner()
    # ExecuTorch's IR verifier would make the sequence length static.
    config = EdgeCompileConfig(_check_ir_validity=False)
    lowered = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    assert not partitioner.explain().refused, partitioner.explain()
    program = lowered.to_executorch()
    (payload,) = program.executorch_program.backend_delegate_data
    (chain,) = read_payload(bytes(payload.data)).instruction_chains
    names = [i.op.NAME for i in chain.instructions]
    assert names.count("GatherQmmNode" if bits else "GatherMmNode") == 2
    method = LoadedMethod(program.buffer)
    for tokens in (TOKENS, TOKENS[:, :1].contiguous()):
        with torch.no_grad():
            expected = model(tokens)
        torch.testing.assert_close(method.execute([tokens])[0], expected, rtol=1e-4, atol=1e-4)
