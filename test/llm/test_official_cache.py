"""A program of one's own whose KV cache is that of `kvcache::update_and_attend`, which is in no buffer."""

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.extension.llm.cache.reference_cache import CacheConfig, ContiguousReferenceCache
from executorch.extension.llm.cache.update_and_attend import REGISTRY
from executorch_mlx import LLM, MLXPartitioner, SamplingHead
from irprograms.options import option

VOCABULARY, WIDTH, CONTEXT, CHUNK, WINDOW = 64, 16, 64, 16, 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.project, self.head = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, position):
        positions = position + torch.arange(tokens.shape[1])
        x = self.embed(tokens) + self.positions(positions)
        q, k, v = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = torch.ops.kvcache.update_and_attend(q, k, v, positions.to(torch.int32)[:, None], 0, 1.0, torch.float32)
        return self.head((x + y.transpose(1, 2).flatten(2))[:, -1])


class Forward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = SamplingHead(Decoder())

    def forward(self, tokens, input_pos, temperature, top_p, seed):
        return self.decoder(tokens, input_pos, temperature=temperature, top_p=top_p, seed=seed)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    inputs = {
        "tokens": torch.zeros(1, 2, dtype=torch.int64),
        "input_pos": torch.tensor([0]),
        "temperature": torch.tensor(0.0),
        "top_p": torch.tensor(1.0),
        "seed": torch.tensor(0),
    }
    shapes = dict.fromkeys(inputs) | {"tokens": {1: torch.export.Dim("sequence", min=1, max=CHUNK)}}
    cache = ContiguousReferenceCache(CacheConfig(n_layers=1, n_kv_heads=2, head_dim=WIDTH // 2, capacity=CONTEXT))
    REGISTRY.install("test_official_cache", cache)
    with torch.no_grad(), REGISTRY.active("test_official_cache"):
        exported = torch.export.export(Forward().eval(), tuple(inputs.values()), dynamic_shapes=shapes)
    metadata = {
        "get_max_seq_len": CHUNK,
        "get_max_context_len": CONTEXT,
        "get_max_rewind": CONTEXT,
        "get_vocab_size": VOCABULARY,
        "get_bos_id": -1,
        "get_eos_ids": [0],
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "sampling_head": True,
        "sampling_seed": True,
    }
    lowered = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()], constant_methods=metadata)
    path = tmp_path_factory.mktemp("official") / "model.pte"
    path.write_bytes(lowered.to_executorch().buffer)
    return path


def answer(llm, prompt):
    return llm.generate(prompt, max_new_tokens=12, ignore_eos=True).result().tokens


def test_prefixes_are_refused(program, tmp_path):
    llm = LLM.load(program)
    tokens = answer(llm, PROMPT)
    with pytest.raises(Exception, match="keeps its cache outside of MLX"):
        llm.save_prefix(PROMPT, tmp_path / "prefix")
    assert answer(llm, PROMPT[:5]) != tokens and answer(llm, PROMPT) == tokens


def test_ring_buffers_start_again_instead_of_going_back(program):
    """With the load option kv_windows, earlier positions have been overwritten, whatever get_max_rewind says."""
    with option("kv_windows", str(WINDOW)):
        expected = [answer(LLM.load(program), prompt) for prompt in (PROMPT, PROMPT[:6] + [7])]
        llm = LLM.load(program)
        assert [answer(llm, prompt) for prompt in (PROMPT, PROMPT[:6] + [7])] == expected
