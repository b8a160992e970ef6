"""The logits of a position depend on the tokens before it only: not on the chunks, nor on what the cache held before."""

import sys

import pytest
import torch
from executorch_mlx import Runtime
from executorch_mlx.llm.export import export_llm
from test_families import FAMILIES, random_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems use MLX's matrix products")

# Wide enough for every kernel of a matrix product, with lengths that are no multiples of a vector.
WIDE = dict(hidden_size=328, intermediate_size=424, vocab_size=256, max_position_embeddings=400)
PROMPT_LENGTH, CHUNK = 110, 64
SPLITS = {"1": [1], "3": [3], "16": [16], "64": [64], "mixed": [33, 1, 7, 40, 2, 12]}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


def export(family, path, dtype=torch.float32, quantize="none"):
    config, model, changes = FAMILIES[family]
    sizes = dict(WIDE)
    if quantize != "none":
        sizes |= dict(hidden_size=320, intermediate_size=448)  # multiples of a group
    if "longrope" in family:
        del sizes["hidden_size"]  # the family's factors are for a small head
    model = random_model(config, model, changes | sizes)
    exported = export_llm(
        model, dtype=dtype, quantize=quantize, chunk=CHUNK, max_context_len=200, outputs="logits", verify=False)
    assert exported.report.refused == ()
    exported.save(path)
    return Runtime.get().load_program(path)


def logits_by_position(method, prompt, lengths):
    """The logits after each chunk, by the position of its last token. The chunks have these lengths, in turn."""
    logits, at, i = {}, 0, 0
    while at < len(prompt):
        tokens = prompt[at : at + lengths[i % len(lengths)]]
        output = method.execute([tokens[None], torch.tensor([at])])[0]
        at, i = at + len(tokens), i + 1
        logits[at - 1] = output.clone()
    return logits


def assert_chunks_do_not_matter(program):
    method = program.load_method("forward")
    prompt = torch.randint(1, 256, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(1))
    expected = logits_by_position(method, prompt, SPLITS["1"])
    assert len({tuple(x.flatten().tolist()) for x in expected.values()}) > PROMPT_LENGTH / 2
    different = {}
    for name, lengths in SPLITS.items():
        logits_by_position(method, prompt.flip(0), [50])  # leaves other keys and values in the cache
        for position, logits in logits_by_position(method, prompt, lengths).items():
            if not torch.equal(logits, expected[position]):
                distance = (logits.float() - expected[position].float()).abs().max().item()
                different.setdefault(name, []).append((position, distance))
    assert not different, {name: (len(found), found[:3]) for name, found in different.items()}


def test_float32(family, tmp_path):
    assert_chunks_do_not_matter(export(family, tmp_path / "model.pte"))


@pytest.mark.parametrize(
    "form",
    [
        dict(dtype=torch.bfloat16),
        dict(dtype=torch.float16),
        dict(quantize="int4"),
        dict(quantize="int8"),
        dict(quantize="int4", dtype=torch.bfloat16),
    ],
    ids=["bfloat16", "float16", "int4", "int8", "int4 of bfloat16"],
)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_forms(name, form, tmp_path):
    assert_chunks_do_not_matter(export(name, tmp_path / "model.pte", **form))
