"""`narrow_to_last_token` computes the end of a graph for one token, and changes no result."""

import copy

import pytest
import torch
from executorch_mlx.custom_ops.quantized import gathered_matmul
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export.experts import use_gathered_experts
from executorch_mlx.llm.export.methods import export_methods, method_kinds
from executorch_mlx.llm.export.passes.last_token import narrow_to_last_token
from executorch_mlx.llm.export_options import HeadConfig
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

WIDTH = 8
LENGTHS = (1, 2, 7)


class Block(torch.nn.Module):
    """Selects the last token of `part(x)`, as the logits of a prompt are."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.part(self, x)[:, -1:]


def attention(self, x):
    q = x.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
    y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return x + self.linear(y.transpose(1, 2).contiguous().reshape(1, x.shape[1], -1))


def halves(self, x):
    gate, up = self.linear(x).chunk(2, -1)
    return torch.cat([gate.sigmoid() * up, up], dim=-1)


def norms(self, x):
    y = torch.nn.functional.rms_norm(torch.nn.functional.layer_norm(self.linear(x), (WIDTH,)), (WIDTH,))
    return y * torch.softmax(x, -1) + x.amax(-1, keepdim=True) + x.mean((0, 2))[:, None]


def experts(self, x):
    flat = x.reshape(-1, WIDTH)
    weights, index = self.linear(flat).softmax(-1).topk(2, -1)
    y = gathered_matmul(flat[:, None, None], self.linear.weight.expand(WIDTH, -1, -1), index).squeeze(2)
    return (y * weights.unsqueeze(-1)).sum(1).reshape(x.shape)


def broadcast(self, x):
    """The linear layer gets the tokens on its last axis, and one operand has a single token."""
    return self.linear(x) * x[:, :1] + x.mT.permute(0, 2, 1) - self.linear(x[:, :1])


def of_all_tokens(self, x):
    return torch.cumsum(self.linear(x), 1)


def after_all_tokens(self, x):
    return self.linear(torch.cumsum(x, 1)) + x.softmax(1)


def mean_of_tokens(self, x):
    """The mean is over the tokens, so it needs all of them."""
    y = self.linear(x)
    return y - y.mean(1, keepdim=True)


NARROWED = [attention, halves, norms, experts, broadcast, after_all_tokens]


def exported(module):
    tokens = torch.export.Dim("tokens", min=1, max=64)
    return torch.export.export(module.eval(), (torch.randn(1, 3, WIDTH),), dynamic_shapes=({1: tokens},))


def rows_of_products(program):
    """The numbers of tokens in the products of the graph."""
    targets = (torch.ops.aten.linear.default, gathered_matmul)
    nodes = (node for node in program.graph.nodes if node.target in targets)
    return [node.args[0].meta["val"].shape[0 if node.args[0].meta["val"].dim() == 4 else -2] for node in nodes]


@pytest.mark.parametrize("part", [*NARROWED, of_all_tokens, mean_of_tokens])
def test_results_stay_the_same(part):
    torch.manual_seed(0)
    module = Block(part)
    program = exported(module)
    narrow_to_last_token(program)
    for length in LENGTHS:
        x = torch.randn(1, length, WIDTH)
        torch.testing.assert_close(program.module()(x), module(x))


@pytest.mark.parametrize("part", NARROWED)
def test_products_get_one_token(part):
    program = exported(Block(part))
    narrow_to_last_token(program)
    assert [str(rows) for rows in rows_of_products(program)] == ["1"] * len(rows_of_products(program))


@pytest.mark.parametrize("part", [of_all_tokens, mean_of_tokens])
def test_a_product_that_other_tokens_need_stays(part):
    program = exported(Block(part))
    before = str(program.graph)
    narrow_to_last_token(program)
    assert str(program.graph) == before


class Returned(torch.nn.Module):
    """Also returns the hidden states of all tokens, and writes those to a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1, 64, WIDTH))

    def forward(self, x):
        states = self.linear(x)
        self.seen[:, : x.shape[1]] = states * 2
        return self.linear(states.relu()).select(1, -1), states


def test_what_else_uses_the_states_of_all_tokens_gets_them():
    torch.manual_seed(0)
    module = Returned()
    program = exported(module)
    narrow_to_last_token(program)
    first, second = rows_of_products(program)
    assert isinstance(first, torch.SymInt) and second == 1
    x = torch.randn(1, 5, WIDTH)
    narrowed = program.module()
    torch.testing.assert_close(narrowed(x), module(x))
    torch.testing.assert_close(narrowed.seen, module.seen)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "experts": Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_last_layer_of_a_model_computes_one_token(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name]).eval()
    decoder = CachedDecoder(use_gathered_experts(model), max_context_len=32)
    kinds = method_kinds("logits", 1, verify=False, draft=False)
    program = export_methods(decoder, kinds, HeadConfig())["forward"]
    narrowed = copy.deepcopy(program)
    narrow_to_last_token(narrowed)
    # Query, key and value of both layers, and the rest of the first layer, need all tokens.
    all_tokens = [rows for rows in rows_of_products(narrowed) if isinstance(rows, torch.SymInt)]
    one_token = [rows for rows in rows_of_products(narrowed) if rows == 1]
    assert len(one_token) > len(all_tokens) - 2 * 3
    tokens = torch.randint(64, (1, 9))
    inputs = (tokens, torch.tensor([0]))
    torch.testing.assert_close(narrowed.module()(*inputs), program.module()(*inputs))
