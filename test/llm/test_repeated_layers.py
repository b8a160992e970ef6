"""`repeated_layers`: traces with repeated layers have the graphs of plain traces."""

import pytest
import torch
import transformers as hf
from executorch_mlx.llm.export import methods
from executorch_mlx.llm.export.decoder import CachedDecoder
from executorch_mlx.llm.export_options import HeadConfig
from executorch_mlx.workarounds.repeated_layers import Unrepeatable, expand, trace_repeated
from torchao.quantization import Int8WeightOnlyConfig, quantize_

COMMON = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
WINDOWS = dict(head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2)
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**COMMON)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**COMMON, head_dim=8)),
    "windows": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**COMMON, **WINDOWS)),
    "experts": lambda: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(**COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
}


def graph_of(program: torch.export.ExportedProgram) -> list[str]:
    """The calls of a program in order, with their operands by number. Leaves out sizes that nothing uses."""
    program.graph.eliminate_dead_code()
    numbers = {node: i for i, node in enumerate(program.graph.nodes)}

    def text(node):
        return f"%{numbers[node]}" if node.op != "placeholder" else node.name

    mapped = (torch.fx.node.map_arg((n.args, n.kwargs), text) for n in program.graph.nodes)
    return [f"{n.op} {n.target if n.op != 'placeholder' else n.name} {a}" for n, a in zip(program.graph.nodes, mapped)]


def decoder_of(name: str, rows: int = 1) -> CachedDecoder:
    torch.manual_seed(0)
    model = MODELS[name]().eval().requires_grad_(False)
    return CachedDecoder(model, rows=rows, max_context_len=64, chunk=32)


def traces(decoder: CachedDecoder, kind: methods.MethodKind) -> tuple[list[str], list[str]]:
    """The graphs of a method, traced with repeated layers and without."""
    method = methods._Method(decoder, None, kind, 0)
    repeated = graph_of(methods._export(method, HeadConfig()))
    return repeated, graph_of(methods._export(method, HeadConfig(), repeat=False))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ("chunk", "verify"))
def test_repeated_layers_have_the_graph_of_a_plain_trace(name, form):
    repeated, plain = traces(decoder_of(name), methods.MethodKind(form, True))
    assert repeated == plain


def test_repeated_layers_of_a_batch():
    repeated, plain = traces(decoder_of("llama", rows=2), methods.MethodKind("decode", True, 2))
    assert repeated == plain


@pytest.mark.parametrize("name, repeats", [("llama", 3), ("qwen3", 3), ("windows", 2), ("experts", 3)])
def test_equal_layers_of_a_model_are_repeated(name, repeats):
    decoder, kind = decoder_of(name), methods.MethodKind("chunk", True)
    inputs = methods.example_inputs(kind, decoder, HeadConfig(), 2)
    args = inputs.pop("tokens"), inputs.pop("input_pos")
    method = methods._Method(decoder, None, kind, 0)
    with trace_repeated(method, decoder.model.model.layers), torch.no_grad():
        program = torch.export.export(method, args, inputs)
    assert str(program.graph).count("mlx.repeated_layer") == repeats


class Layer(torch.nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.ones(4)), factor
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        self.state.copy_(self.state + x)
        return torch.tanh(x * self.weight) * self.factor + self.state


class Stack(torch.nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def exported(model: torch.nn.Module) -> torch.export.ExportedProgram:
    with trace_repeated(model, model.layers), torch.no_grad():
        return torch.export.export(model, (torch.ones(4),))


def repeats_of(model: torch.nn.Module) -> int:
    """The number of repeated layers. Also checks the expanded graph."""
    program = exported(model)
    count = str(program.graph).count("mlx.repeated_layer")
    expand(program)
    with torch.no_grad():
        assert graph_of(program) == graph_of(torch.export.export(model, (torch.ones(4),)))
    assert not any("forward" in vars(layer) for layer in model.layers)
    return count


def test_equal_layers_are_repeated():
    assert repeats_of(Stack(Layer(), Layer(), Layer())) == 2


def test_a_model_with_weights_of_torchao_is_traced():
    model = MODELS["llama"]().eval().requires_grad_(False)
    quantize_(model, Int8WeightOnlyConfig())
    decoder = CachedDecoder(model, max_context_len=64, chunk=32)
    methods.export_methods(decoder, {"forward": methods.MethodKind("chunk", False)}, HeadConfig.minimal())


def test_a_layer_with_another_constant_is_unrepeatable():
    with pytest.raises(Unrepeatable):
        exported(Stack(Layer(), Layer(3.0)))


def test_a_layer_that_runs_twice_is_unrepeatable():
    layer = Layer()
    with pytest.raises(Unrepeatable):
        exported(Stack(layer, Layer(), layer))


class UsesOwnInput(Layer):
    """Layer 1 adds its input, where layer 0 adds the result of tanh."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x):
        y = torch.tanh(x)
        return y + (y if self.index == 0 else x)


def test_a_layer_with_other_operands_is_unrepeatable():
    with pytest.raises(Unrepeatable):
        exported(Stack(UsesOwnInput(0), UsesOwnInput(1)))


KEPT = []


class Keeps(Layer):
    """Keeps an intermediate result, as a layer does whose keys and values another layer uses."""

    def forward(self, x):
        KEPT.append(torch.tanh(x))
        return KEPT[-1] * self.weight


class Reads(Layer):
    def forward(self, x):
        return x + KEPT[-1]


def test_an_intermediate_result_that_another_layer_uses_is_unrepeatable():
    program = exported(Stack(Keeps(), Keeps(), Reads()))
    with pytest.raises(Unrepeatable):
        expand(program)
