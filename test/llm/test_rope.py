"""Rotary embeddings without state, against those of transformers for one token in each call."""

import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.reference import Reference

SMALL = dict(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=80,
    pad_token_id=0,
)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    original_max_position_embeddings=40,
    short_factor=[1.0] * 6,
    long_factor=[2.0] * 6,
)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
PLAIN = dict(rope_type="default", rope_theta=1e4)
BY_LAYER = dict(head_dim=12, sliding_window=12, layer_types=["sliding_attention", "full_attention"])
MODELS = {
    "longrope": (hf.Phi3Config, dict(rope_parameters=LONGROPE)),
    "dynamic": (hf.LlamaConfig, dict(rope_parameters=DYNAMIC)),
    "longrope by layer": (
        hf.Gemma3TextConfig,
        BY_LAYER | dict(rope_parameters={"full_attention": LONGROPE, "sliding_attention": PLAIN}),
    ),
    "dynamic by layer": (
        hf.Gemma3TextConfig,
        BY_LAYER | dict(rope_parameters={"full_attention": DYNAMIC, "sliding_attention": PLAIN}),
    ),
    # Cosines and sines in another order, only one for each pair, and complex numbers.
    "dynamic, neighbours": (hf.CohereConfig, dict(rope_parameters=DYNAMIC)),
    "dynamic, pairs": (hf.GptOssConfig, dict(head_dim=12, num_local_experts=4, rope_parameters=DYNAMIC)),
    "dynamic, complex": (hf.Llama4TextConfig, dict(head_dim=12, num_local_experts=2, rope_parameters=DYNAMIC)),
    # The model gives three positions for each token.
    "dynamic, three axes": (
        hf.Qwen3_5TextConfig,
        dict(head_dim=12, layer_types=["full_attention"] * 2, rope_parameters=DYNAMIC | dict(mrope_section=[2, 2, 2])),
    ),
    "longrope by layer, attributes": (
        hf.Lfm3Config,
        BY_LAYER | dict(rope_parameters={"full_attention": LONGROPE, "sliding_attention": PLAIN}),
    ),
    "longrope with scales": (
        hf.PhimoeConfig,
        dict(num_local_experts=2, rope_parameters=LONGROPE | dict(short_mscale=1.25, long_mscale=1.5)),
    ),
}


def parts_of(result):
    """Return the two tensors of a result, which may be one tensor of complex numbers."""
    return (result.real, result.imag) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("name", MODELS)
def test_each_position_is_computed_alone(name):
    config_class, changes = MODELS[name]
    torch.manual_seed(0)
    model = use_gathered_experts(hf.AutoModelForCausalLM.from_config(config_class(**SMALL | changes)).eval())
    rotary, reference = model.model.rotary_emb, Reference.of(model, 80)
    layer = ["full_attention"] if "layer" in name else []
    x, positions = torch.zeros(1, 1, 48), torch.arange(100)[None]
    expected = [torch.cat(parts, 1) for parts in zip(*(parts_of(rotary(x, p, *layer)) for p in positions.split(1, 1)))]
    reference.check(CachedDecoder(model, max_context_len=80))
    assert model.model.rotary_emb is not rotary
    got = parts_of(model.model.rotary_emb(x, positions, *layer))
    if name == "longrope with scales":  # transformers has the long scale, but not the long frequencies
        angles = torch.arange(40, 100)[:, None] / torch.tensor([2.0 * 1e4 ** (i / 6) for i in range(6)]).repeat(2)
        expected[0][0, 40:], expected[1][0, 40:] = 1.5 * angles.cos(), 1.5 * angles.sin()
    torch.testing.assert_close(list(got), expected, rtol=1e-4, atol=1e-4)
