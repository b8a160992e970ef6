"""The cache in the program: its rows, its bounds, and that a step writes it where it lies."""

import mlx.core as mx
import pytest
import torch
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.program import LLMProgram
from executorch_mlx.llm.parameters import Sampling
from transformers import LlamaConfig, LlamaForCausalLM

CAPACITY = 16384
CACHE_BYTES = CAPACITY * 2 * 64 * 4  # of one of the four buffers


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=128,
        max_position_embeddings=CAPACITY,
    )
    path = tmp_path_factory.mktemp("cache") / "model.pte"
    export_llm(LlamaForCausalLM(config).eval(), max_seq_len=CAPACITY, sampling=Sampling(min_p=False)).save(path)
    program = LLMProgram(path)
    program.step([1, 2, 3], 0)  # the first call may be undone, and copies
    return program


# Sampling branches on what the logits are, in the middle of the step.
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 40, "top_p": 0.9}])
def test_a_step_copies_no_buffer(program, settings):
    program.step([1], 3, **settings)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    program.step([1], 4, **settings)
    assert mx.get_peak_memory() - before < CACHE_BYTES / 2
    assert mx.get_active_memory() - before < CACHE_BYTES / 2


def test_eager_update_writes_its_rows_only():
    cache, update = torch.zeros(1, 2, 6, 3), torch.ones(1, 2, 2, 3)
    updated = torch.ops.mlx.cache_update(cache, update, torch.tensor([3]))
    assert updated[:, :, 3:5].eq(1).all() and updated.sum() == update.sum()
    assert cache.eq(0).all()


@pytest.mark.parametrize("start", [-1, 5])
def test_eager_update_checks_its_rows(start):
    cache, update = torch.zeros(1, 2, 6, 3), torch.ones(1, 2, 2, 3)
    with pytest.raises(ValueError, match=f"rows {start} to {start + 2} are outside a cache of 6"):
        torch.ops.mlx.cache_update(cache, update, torch.tensor([start]))
