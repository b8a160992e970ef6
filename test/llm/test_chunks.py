"""The logits of a position depend on the tokens before it only: not on the chunks, nor on what the cache held before.

For models with states, neither do they depend on other rows.
"""

import sys

import pytest
import torch
from executorch_mlx import Runtime
from executorch_mlx.llm.export import export_llm
from loaded_method import LoadedMethod
from test_families import CHUNK, CONTEXT, FAMILIES, family_program, wide_model
from test_state_families import random_model

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems use MLX's matrix products")

PROMPT_LENGTH = 110
# Lengths of the chunks. If the prompt is longer, the lengths are repeated.
SPLITS = {"1": [1], "3": [3], "16": [16], "64": [64], "mixed": [33, 1, 7, 40, 2, 12]}


def logits_by_position(method, prompt, lengths, *row):
    """Return the logits after each chunk, by the position of the last token of the chunk."""
    logits, at, i = {}, 0, 0
    while at < len(prompt):
        tokens = prompt[at : at + lengths[i % len(lengths)]]
        output = method.execute([tokens[None], torch.tensor([at]), *row])[0]
        at, i = at + len(tokens), i + 1
        logits[at - 1] = output.clone()
    return logits


def random_prompt(seed):
    return torch.randint(1, 256, (PROMPT_LENGTH,), generator=torch.Generator().manual_seed(seed))


def assert_chunks_do_not_matter(method, *row):
    """`method` is `forward`, or `prefill`, which takes a `row`."""
    prompt = random_prompt(1)
    expected = logits_by_position(method, prompt, SPLITS["1"], *row)
    assert len({tuple(x.flatten().tolist()) for x in expected.values()}) > PROMPT_LENGTH / 2
    different = {}
    for name, lengths in SPLITS.items():
        logits_by_position(method, prompt.flip(0), [50], *row)  # leaves other keys and values in the cache
        for position, logits in logits_by_position(method, prompt, lengths, *row).items():
            if not torch.equal(logits, expected[position]):
                distance = (logits.float() - expected[position].float()).abs().max().item()
                different.setdefault(name, []).append((position, distance))
    assert not different, {name: (len(found), found[:3]) for name, found in different.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_float32(name, tmp_path_factory):
    assert_chunks_do_not_matter(LoadedMethod(family_program(name, tmp_path_factory)))


@pytest.mark.parametrize(
    "options",
    [
        dict(dtype=torch.bfloat16),
        dict(dtype=torch.float16),
        dict(quantize="int4"),
        dict(quantize="int8"),
        dict(quantize="int4", dtype=torch.bfloat16),
        dict(quantize="int4", activations="int8", allow_extensions=True),
    ],
    ids=["bfloat16", "float16", "int4", "int8", "int4 of bfloat16", "int4 with int8 activations"],
)
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_half_precision_and_quantization(name, options, tmp_path):
    sizes = dict(hidden_size=320, intermediate_size=448) if "quantize" in options else {}  # multiples of the group size
    model = wide_model(name, **sizes)
    exported = export_llm(model, **options, chunk=CHUNK, max_context_len=CONTEXT, outputs="logits", verify=False)
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    assert_chunks_do_not_matter(LoadedMethod(tmp_path / "model.pte"))


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_linear", "mamba2", "mamba", "minimax", "recurrent_gemma", "zamba2"])
def test_models_with_states(name, tmp_path):
    """A row that is decoded together with others gives the logits that it gives alone."""
    exported = export_llm(
        random_model(name), chunk=CHUNK, max_context_len=CONTEXT, batch=2, outputs="logits", verify=False
    )
    assert exported.report.refused == ()
    exported.save(tmp_path / "model.pte")
    program = Runtime.get().load_program(tmp_path / "model.pte")
    prefill, decode = program.load_method("prefill"), program.load_method("decode")
    rows, prompts = torch.arange(2), torch.stack([random_prompt(1), random_prompt(2)])
    assert_chunks_do_not_matter(prefill, rows[1:])
    alone = [logits_by_position(prefill, prompt, SPLITS["1"], row) for prompt, row in zip(prompts, rows[:, None])]
    for position in range(PROMPT_LENGTH):
        inputs = [prompts[:, position : position + 1].contiguous(), torch.tensor([position] * 2), rows]
        for logits, expected in zip(decode.execute(inputs)[0], alone, strict=True):
            assert torch.equal(logits, expected[position][0]), position
