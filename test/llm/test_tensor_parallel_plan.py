"""The plan of a tensor-parallel model, made from its graph. The parts together give the logits of the whole model."""

import os

import pytest
import torch
from executorch_mlx.custom_ops.distributed import simulated_group
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.head_config import HeadConfig
from executorch_mlx.llm.export.methods import MethodKind, export_methods
from executorch_mlx.llm.export.quantization.conversion import convert_weights
from executorch_mlx.llm.export.tensor_parallel import parts
from executorch_mlx.llm.export.tensor_parallel.plan import Plan, plan, tensors_of
from executorch_mlx.llm.export.tensor_parallel.rewriter import part_of, rewritten
from tensor_parallel_models import FAMILIES, MORE_FAMILIES, VOCABULARY, model


def exported(family, heads=4, key_heads=2, quantize="none", capacity=64):
    """Return the exported methods of a small model, before they are lowered."""
    made = model(family, heads, key_heads)
    use_gathered_experts(made)
    group = None if quantize == "none" else 32
    convert_weights(
        made, quantize, group, torch.float32, tokenizer=None, calibrate=None, progress=lambda step: None
    )
    decoder = CachedDecoder(made, max_context_len=capacity, chunk=16)
    return export_methods(decoder, {"forward": MethodKind("chunk", False)}, HeadConfig.minimal())


def parts_of(methods, found: Plan):
    """Yield the program of each part."""
    program, tensors = methods["forward"], tensors_of(methods["forward"])
    for rank in range(found.processes):
        parts = {name: part_of(tensors[name], s, rank, found.processes) for name, s in found.tensors.items()}
        yield rewritten(program, found.analyses["forward"], parts, rank, found.processes)


def check_parts(methods, found: Plan):
    """Compare all parts with the whole model in two calls. The second call reads the caches of the first."""
    whole, modules = methods["forward"].module(), [part.module() for part in parts_of(methods, found)]
    generator = torch.Generator().manual_seed(1)
    for start, length in ((0, 7), (7, 3)):
        inputs = torch.randint(VOCABULARY, (1, length), generator=generator), torch.tensor([start])
        expected = whole(*inputs)
        results = simulated_group([lambda m=module: m(*inputs) for module in modules])
        for result in results:
            assert torch.equal(result, results[0])
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * expected.std().item())


def split_axes(found: Plan):
    """Return the axis of each weight that is split, by the last two components of its name."""
    return {".".join(name.split(".")[-2:]): split.axis for name, split in found.tensors.items()}


@pytest.mark.parametrize("family", FAMILIES + (MORE_FAMILIES if os.environ.get("LONG") else ()))
def test_parts_give_the_logits_of_the_whole_model(family):
    methods = exported(family)
    found = plan(methods, 2, VOCABULARY)
    check_parts(methods, found)
    # A router, and the compression of latent attention, stay whole.
    assert all("gate." in name or "router" in name or "_a_proj" in name for name in found.whole), found.whole


def test_four_parts_of_a_quantized_model_with_two_key_heads():
    methods = exported("llama", heads=4, key_heads=2, quantize="int4")
    found = plan(methods, 4, VOCABULARY)
    check_parts(methods, found)
    split = split_axes(found)
    assert [split[f"{n}_proj.weight"] for n in ("q", "k", "v", "o", "gate", "up", "down")] == [0, 0, 0, 1, 0, 0, 1]
    assert split["lm_head.weight"] == split["embed_tokens.weight"] == 0
    (keys,) = [s for name, s in found.tensors.items() if name.endswith("key_cache_0")]
    assert keys.axis == 1 and [(s.size, s.copies) for s in keys.segments] == [(2, 2)]  # each head in two processes
    shapes = [tuple(p.state_dict["decoder.key_cache_0"].shape) for p in parts_of(methods, found)]
    assert shapes == [(1, 1, 64, 32)] * 4
    sizes = [sum(t.nbytes for t in tensors_of(part).values()) for part in parts_of(methods, found)]
    assert max(sizes) < 0.45 * sum(t.nbytes for t in tensors_of(methods["forward"]).values())


@pytest.mark.parametrize(
    "options, processes, reason",
    [
        ({"heads": 3, "key_heads": 3}, 2, "attention cannot be split among 2 processes"),
        ({"heads": 2, "key_heads": 1}, 4, "attention cannot be split among 4 processes"),
        ({"heads": 6, "key_heads": 3}, 2, "attention cannot be split among 2 processes"),
        ({"heads": 4, "quantize": "int4"}, 16, "cannot be split among 16 processes"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(options, processes, reason):
    with pytest.raises(ValueError, match=f"tensor_parallel: .*{reason}"):
        plan(exported("llama", **options), processes, VOCABULARY)


def test_the_share_of_whole_weights_does_not_depend_on_the_kv_caches():
    shares = set()
    for capacity in (64, 4096):
        with pytest.raises(ValueError, match="of the weights of products cannot be split") as error:
            plan(exported("llama", heads=3, key_heads=3, capacity=capacity), 3, VOCABULARY)
        shares.add(str(error.value))
    assert len(shares) == 1


def test_parts_of_a_model_that_scales_its_logits_pass_the_check():
    """Cohere multiplies the logits by a number, after the processes have gathered them."""
    made = model("cohere")
    assert made.config.logit_scale == 0.0625
    exported = export_llm(
        made, max_context_len=32, chunk=16, tensor_parallel=2, outputs="logits", head=HeadConfig.minimal()
    )
    assert exported.parts == 2


def test_parts_with_other_weights_fail_the_check(monkeypatch):
    def part_of_other(tensor, *arguments):
        if tensor.shape == (VOCABULARY, 128):
            tensor = torch.nn.Parameter(-tensor, requires_grad=False)
        return part_of(tensor, *arguments)

    monkeypatch.setattr(parts, "part_of", part_of_other)
    with pytest.raises(ValueError, match="tensor_parallel: 2 parts of LlamaForCausalLM give other logits than the whole"):
        export_llm(model("llama"), max_context_len=32, chunk=16, tensor_parallel=2, outputs="logits")
