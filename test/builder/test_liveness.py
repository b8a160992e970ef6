"""Temporaries that share a slot leave the results unchanged."""

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, preprocess
from executorch_mlx.builder import liveness
from executorch_mlx.builder.assemble import assemble
from executorch_mlx.builder.emitter import Emitted, Replacement
from executorch_mlx.builder.liveness import lifetimes, recycle
from executorch_mlx.builder.program import ProgramBuilder
from executorch_mlx.builder.slots import Interface, Space, TensorSlot
from executorch_mlx.serialization import ir
from loaded_method import LoadedMethod


class RandomProgram:
    """A random program of elementwise instructions, splits, branches, scans and in-place updates.

    It has the attributes of a ProgramBuilder that `assemble` reads.
    """

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.inputs = [self.slot(Space.INPUT) for _ in range(2)]
        self.buffer = self.slot(Space.BUFFER)
        self.buffer.data = lambda: torch.zeros(2)
        self.chains = [[]]
        self.replacements = []
        self.buffer_keys = {}
        known = list(self.inputs)
        self.fill(self.chains[0], known, depth=0)
        outputs = self.random.sample([s for s in known if s.space == Space.TEMP], 2)
        for slot in outputs:
            slot.space = Space.OUTPUT
        self.interface = Interface(self.inputs, outputs, [self.buffer])

    @staticmethod
    def slot(space=Space.TEMP) -> TensorSlot:
        return TensorSlot(torch.float32, (2,), space)

    def fill(self, chain, known, depth):
        """Append random instructions to `chain`, and their results to `known`."""
        for _ in range(self.random.randint(4, 14)):
            kind = self.random.random()
            if kind < 0.2:
                x, out = self.random.choice(known), self.slot()
                chain.append(Emitted(ir.SiluNode, {"x": x, "out": out}))
                known.append(out)
            elif kind < 0.7 or depth > 1:
                a, b, out = self.random.choice(known), self.random.choice(known), self.slot()
                chain.append(Emitted(ir.AddNode, {"a": a, "b": b, "out": out}))
                known.append(out)
            elif kind < 0.78:
                fields = {"dst": self.buffer, "update": self.random.choice(known), "out": self.buffer}
                chain.append(Emitted(ir.SliceUpdateNode, fields | {"axis": 0, "start": 0, "stop": 2}))
            elif kind < 0.84:
                outs = [self.slot(), self.slot()]
                fields = {"x": self.random.choice(known), "outs": outs, "sizes": [1, 1]}
                chain.append(Emitted(ir.SplitNode, fields))
                known += outs
            elif kind < 0.92:
                outs = [self.slot(), self.slot()]
                chain.append(Emitted(ir.IfNode, {"cond": 1} | self.branches(known, depth, outs)))
                known += outs
            else:
                chain.append(self.scan(chain, known, depth))

    def branches(self, known, depth, outs):
        indices = []
        for _ in range(2):
            chain, inner = [], list(known)
            self.chains.append(chain)
            indices.append(len(self.chains) - 1)
            self.fill(chain, inner, depth + 1)
            for out in outs:
                chain.append(Emitted(ir.IdCopyNode, {"x": self.random.choice(inner), "out": out}))
        return {"then_chain_idx": indices[0], "else_chain_idx": indices[1]}

    def scan(self, outer, known, depth):
        carry, sliced, out = self.slot(), self.slot(), self.slot()
        outer.append(Emitted(ir.IdCopyNode, {"x": self.random.choice(known), "out": carry}))
        chain, inner = [], [*known, carry, sliced]
        self.chains.append(chain)
        index = len(self.chains) - 1
        self.fill(chain, inner, depth + 1)
        for slot in (out, carry):
            chain.append(Emitted(ir.IdCopyNode, {"x": self.random.choice(inner), "out": slot}))
        originals = [self.random.choice(known)]
        known += [out, carry]
        fields = {"originals": originals, "sliced": [sliced], "outputs": [out], "carry": [carry]}
        return Emitted(ir.ScanNode, fields | {"body_chain_idx": index, "scan_axis": 0})


class Interpreter:
    """Runs a program symbolically: the value of a slot is a hash of the expression that computes it.

    `branch_seed` determines which branches are taken. `results` has the values of the outputs and of the buffer.
    """

    def __init__(self, graph: ir.MLXGraph, branch_seed: int):
        self.graph, self.random = graph, random.Random(branch_seed)
        inputs = range(graph.num_constant_tensors, graph.num_constant_tensors + graph.num_input_tensors)
        self.slots = {tid: ("input", tid) for tid in inputs}
        buffer = graph.mutable_buffer_map[0].idx
        self.slots[buffer] = ("buffer",)
        self.run(graph.main_chain_idx)
        self.results = [self.slots[s.idx] for s in graph.output_map] + [self.slots[buffer]]

    def run(self, chain):
        for instruction in self.graph.instruction_chains[chain].instructions:
            self.step(instruction.op)

    def step(self, op):
        get = lambda tid: self.slots[tid.idx]  # noqa: E731
        if isinstance(op, ir.IfNode):
            self.run(self.random.choice([op.then_chain_idx, op.else_chain_idx]))
        elif isinstance(op, ir.ScanNode):
            originals, stacked = [get(s) for s in op.originals], []
            for i in range(3):
                for slot, original in zip(op.sliced, originals):
                    self.slots[slot.idx] = hash((i, original))
                self.run(op.body_chain_idx)
                stacked.append([get(s) for s in op.outputs])
            for slot, values in zip(op.outputs, zip(*stacked)):
                self.slots[slot.idx] = hash(values)
        elif isinstance(op, ir.SplitNode):
            for i, slot in enumerate(op.outs):
                self.slots[slot.idx] = hash((i, get(op.x)))  # each result is written before `x` is read for the next
        elif isinstance(op, ir.IdCopyNode):
            self.slots[op.out.idx] = get(op.x)
        elif isinstance(op, ir.SiluNode):
            self.slots[op.out.idx] = hash(("silu", get(op.x)))
        elif isinstance(op, ir.SliceUpdateNode):
            self.slots[op.out.idx] = hash(("update", get(op.dst), get(op.update)))
        else:
            self.slots[op.out.idx] = hash((get(op.a), get(op.b)))


@pytest.mark.parametrize("seed", range(200))
def test_random_programs_keep_their_results(seed, monkeypatch):
    with monkeypatch.context() as unordered:
        unordered.setattr(liveness, "delay_activations", lambda builder: None)
        plain = assemble(RandomProgram(seed), reuse_slots=False).graph
    shared = assemble(RandomProgram(seed)).graph
    assert shared.num_temp_tensors <= plain.num_temp_tensors
    for branch_seed in range(4):
        assert Interpreter(plain, branch_seed).results == Interpreter(shared, branch_seed).results


def test_activation_runs_where_its_result_is_read(delegate):
    class GatedLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)

        def forward(self, x):
            return torch.nn.functional.silu(self.gate(x)) * self.up(x)

    program = torch.export.export(GatedLayer().eval(), (torch.ones(2, 8),))
    graph = assemble(ProgramBuilder(program.run_decompositions({})).build()).graph
    ops = [type(i.op) for i in graph.instruction_chains[0].instructions]
    assert ops[-2:] == [ir.SiluNode, ir.MultiplyNode]


def test_number_of_slots_is_the_largest_number_of_live_temporaries():
    for seed in range(50):
        program = RandomProgram(seed)
        lives = lifetimes(program)
        numbers = recycle(lives)
        assert set(numbers.values()) == set(range(len(set(numbers.values()))))
        last = max((end for _, end in lives.values()), default=0)
        peak = max(sum(a <= now <= b for a, b in lives.values()) for now in range(last + 1))
        assert len(set(numbers.values())) == peak


@pytest.mark.parametrize("seed", range(20))
def test_slot_numbers_are_deterministic(seed):
    first, second = (assemble(program).graph for program in [RandomProgram(seed), RandomProgram(seed)])
    assert first == second


def test_result_and_operand_of_an_instruction_share_no_slot():
    for seed in range(50):
        for chain in assemble(RandomProgram(seed)).graph.instruction_chains:
            for op in (i.op for i in chain.instructions):
                if isinstance(op, ir.AddNode):
                    assert op.out not in (op.a, op.b)
                if isinstance(op, ir.SplitNode):
                    assert op.x not in op.outs


def test_linear_program_needs_two_slots():
    slots = [TensorSlot(torch.float32, (2,), Space.INPUT)] + [TensorSlot(torch.float32) for _ in range(50)]
    slots[-1].space = Space.OUTPUT
    chain = [Emitted(ir.ExpNode, {"x": a, "out": b}) for a, b in zip(slots, slots[1:])]
    slots[-1].shape = (2,)
    program = SimpleNamespace(chains=[chain], replacements=[], interface=Interface([slots[0]], [slots[-1]], []))
    assert assemble(program).graph.num_temp_tensors == 2


def test_operand_and_result_of_a_replacement_share_no_slot():
    """An extension replaces instructions 1 to 3, of which the first is the last to read the extension's operand."""
    slots = [TensorSlot(torch.float32, (2,), Space.INPUT)] + [TensorSlot(torch.float32) for _ in range(6)]
    slots[-1].space, slots[-1].shape = Space.OUTPUT, (2,)
    chain = [Emitted(ir.ExpNode, {"x": a, "out": b}) for a, b in zip(slots, slots[1:])]
    extension = Emitted(ir.ErfInvNode, {"x": slots[1], "out": slots[4]})
    program = SimpleNamespace(
        chains=[chain],
        replacements=[Replacement(chain, chain[1:4], extension)],
        interface=Interface([slots[0]], [slots[-1]], []),
    )
    (replacement,) = assemble(program).graph.replacements
    assert (replacement.chain, replacement.first, replacement.count) == (0, 1, 3)
    assert replacement.instruction.op.x != replacement.instruction.op.out


def test_replacement_of_dead_instructions_is_dropped():
    slots = [TensorSlot(torch.float32, (2,), Space.INPUT)] + [TensorSlot(torch.float32) for _ in range(3)]
    slots[1].space, slots[1].shape = Space.OUTPUT, (2,)
    chain = [Emitted(ir.ExpNode, {"x": a, "out": b}) for a, b in zip(slots, slots[1:])]
    extension = Emitted(ir.ErfInvNode, {"x": slots[1], "out": slots[3]})
    program = SimpleNamespace(
        chains=[chain],
        replacements=[Replacement(chain, chain[1:], extension)],
        interface=Interface([slots[0]], [slots[1]], []),
    )
    graph = assemble(program).graph
    assert graph.replacements is None and len(graph.instruction_chains[0].instructions) == 1


@pytest.mark.parametrize("outputs, is_kept", [((2, 3), True), ((2,), False), ((3,), True)])
def test_replacement_with_two_results(outputs, is_kept):
    """Without result 3, nothing needs the last instruction, so that result 2 is all that is left to compute."""
    slots = [TensorSlot(torch.float32, (2,), Space.INPUT)] + [TensorSlot(torch.float32, (2,)) for _ in range(3)]
    for index in outputs:
        slots[index].space = Space.OUTPUT
    chain = [Emitted(ir.ExpNode, {"x": a, "out": b}) for a, b in zip(slots, slots[1:])]
    extension = Emitted(ir.QuantizeEntriesNode, {"xs": [slots[1]], "out": slots[2], "out_scales": slots[3]})
    program = SimpleNamespace(
        chains=[chain],
        replacements=[Replacement(chain, chain[1:], extension)],
        interface=Interface([slots[0]], [slots[index] for index in outputs], []),
    )
    graph = assemble(program).graph
    assert len(graph.replacements or ()) == is_kept
    assert len(graph.instruction_chains[0].instructions) == max(outputs)
    if is_kept:
        ((op, count),) = [(r.instruction.op, r.count) for r in graph.replacements]
        assert count == 2 and len({op.xs[0].idx, op.out.idx, op.out_scales.idx}) == 3


class Deep(torch.nn.Module):
    """Has layers with several temporaries each, a buffer that changes, and a branch."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(6))
        self.register_buffer("total", torch.zeros(3, 6))

    def forward(self, x):
        for layer in self.layers:
            a, b = layer(torch.nn.functional.layer_norm(x, (6,))).split(3, -1)
            x = x + torch.cat([torch.sin(b), a * b], -1)
            self.total.add_(x)
        x = torch.cond(x.sum() > 0, lambda x: x.exp() + x, lambda x: x.sin() * x, (x,))
        return torch.softmax(x, -1) + self.total, x


def test_exported_program_keeps_its_results(delegate, monkeypatch):
    torch.manual_seed(1)
    module, results, counts = Deep().eval(), {}, {}
    program = torch.export.export(module, (torch.randn(3, 6),))
    for reuse in (False, True):

        def counting(builder, **options):
            assembled = assemble(builder, reuse_slots=reuse, **options)
            counts[reuse] = assembled.graph.num_temp_tensors
            return assembled

        monkeypatch.setattr(preprocess, "assemble", functools.wraps(assemble)(counting))
        edge = to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()])
        method = LoadedMethod(edge.to_executorch().buffer)
        xs = [torch.full((3, 6), 0.1), torch.full((3, 6), -0.3)]
        results[reuse] = [t.clone() for x in xs for t in method.execute([x])]
    assert counts[True] * 4 < counts[False]
    for plain, shared, eager in zip(results[False], results[True], [t for x in xs for t in module(x)]):
        assert torch.equal(plain, shared)
        torch.testing.assert_close(shared, eager, rtol=1e-4, atol=1e-4)
