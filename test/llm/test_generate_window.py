"""A model with sliding-window attention: its ring-buffer KV cache limits how far it can rewind."""

import random

import pytest
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from transformers import MistralConfig, MistralForCausalLM

WINDOW, CHUNK = 8, 16


def mistral() -> MistralForCausalLM:
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,  # with two layers, tokens before the window have an influence
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=300,
        max_position_embeddings=256,
        sliding_window=WINDOW,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return MistralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    path = tmp_path_factory.mktemp("window") / "model.pte"
    export_llm(mistral(), chunk=CHUNK, speculation=False, verify=False).save(path)
    return LLM.load(path)


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    return mistral().generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rewind, reused", [(CHUNK - 1, True), (CHUNK, False)])
def test_rewind_is_limited_by_the_ring_buffer(llm, rewind, reused):
    generator = random.Random(rewind)
    prompt = [generator.randrange(2, 300) for _ in range(50)]
    llm.generate([7, *prompt], max_new_tokens=1).result()
    llm.generate(prompt, max_new_tokens=1).result()
    # The last token of a prompt is always fed again.
    shorter = llm.generate(prompt[: len(prompt) - rewind + 1], max_new_tokens=12)
    assert shorter.result().tokens == greedy(shorter.prompt, 12)
    assert shorter.metrics.cached_tokens == (len(prompt) - rewind if reused else 0)


def test_random_prefixes_are_reused_correctly(llm):
    rng = random.Random(0)
    base = [rng.randrange(2, 300) for _ in range(60)]
    reused = 0
    for _ in range(25):
        prompt = base[: rng.randrange(1, 61)] + [rng.randrange(2, 300) for _ in range(rng.randrange(20))]
        count = rng.randrange(1, 20)
        generation = llm.generate(prompt, max_new_tokens=count)
        assert generation.result().tokens == greedy(prompt, count)
        reused += generation.metrics.cached_tokens > 0
    assert 0 < reused < 25
