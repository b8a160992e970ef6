"""Temporaries share numbers only where that changes nothing."""

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from executorch_mlx import MLXPartitioner, preprocess
from executorch_mlx.builder.assemble import assemble
from executorch_mlx.builder.liveness import lifetimes, recycle
from executorch_mlx.builder.program import Emitted, Interface
from executorch_mlx.builder.slots import Space, TensorSlot
from executorch_mlx.serialization import ir


class RandomProgram:
    """What ProgramBuilder leaves behind, drawn at random: straight lines, ifs, scans, in-place updates."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.inputs = [self.slot(Space.INPUT) for _ in range(2)]
        self.buffer = self.slot(Space.BUFFER)
        self.buffer.data = lambda: torch.zeros(2)
        self.chains = [[]]
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
        """Emit into `chain`; what it makes is added to `known`."""
        for _ in range(self.random.randint(4, 14)):
            kind = self.random.random()
            if kind < 0.7 or depth > 1:
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


class Machine:
    """Runs a numbered program; a value is the text of how it was made, hashed."""

    def __init__(self, graph: ir.MLXGraph, taken: int):
        self.graph, self.random = graph, random.Random(taken)
        inputs = range(graph.num_constant_tensors, graph.num_constant_tensors + graph.num_input_tensors)
        self.slots = {tid: ("input", tid) for tid in inputs}
        buffer = graph.mutable_buffer_map[0].idx
        self.slots[buffer] = ("buffer",)
        self.run(graph.main_chain_idx)
        self.seen = [self.slots[s.idx] for s in graph.output_map] + [self.slots[buffer]]

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
                self.slots[slot.idx] = hash((i, get(op.x)))  # reads while it writes
        elif isinstance(op, ir.IdCopyNode):
            self.slots[op.out.idx] = get(op.x)
        elif isinstance(op, ir.SliceUpdateNode):
            self.slots[op.out.idx] = hash(("update", get(op.dst), get(op.update)))
        else:
            self.slots[op.out.idx] = hash((get(op.a), get(op.b)))


@pytest.mark.parametrize("seed", range(200))
def test_random_programs_do_the_same(seed):
    plain = assemble(RandomProgram(seed), recycled=False).graph
    recycled = assemble(RandomProgram(seed)).graph
    assert recycled.num_temp_tensors <= plain.num_temp_tensors
    for taken in range(4):
        assert Machine(plain, taken).seen == Machine(recycled, taken).seen


def test_numbers_are_contiguous_and_as_few_as_live_at_once():
    for seed in range(50):
        program = RandomProgram(seed)
        lives = lifetimes(program)
        numbers = recycle(lives)
        assert set(numbers.values()) == set(range(len(set(numbers.values()))))
        last = max((end for _, end in lives.values()), default=0)
        most = max(sum(a <= now <= b for a, b in lives.values()) for now in range(last + 1))
        assert len(set(numbers.values())) == most


def test_a_result_is_no_operand_of_the_same_instruction():
    for seed in range(50):
        for chain in assemble(RandomProgram(seed)).graph.instruction_chains:
            for op in (i.op for i in chain.instructions):
                if isinstance(op, ir.AddNode):
                    assert op.out not in (op.a, op.b)
                if isinstance(op, ir.SplitNode):
                    assert op.x not in op.outs


def test_a_long_line_needs_two():
    slots = [TensorSlot(torch.float32, (2,), Space.INPUT)] + [TensorSlot(torch.float32) for _ in range(50)]
    slots[-1].space = Space.OUTPUT
    chain = [Emitted(ir.ExpNode, {"x": a, "out": b}) for a, b in zip(slots, slots[1:])]
    slots[-1].shape = (2,)
    program = SimpleNamespace(chains=[chain], interface=Interface([slots[0]], [slots[-1]], []))
    assert assemble(program).graph.num_temp_tensors == 2


class Deep(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(6))
        self.register_buffer("seen", torch.zeros(3, 6))

    def forward(self, x):
        for layer in self.layers:
            a, b = layer(torch.nn.functional.layer_norm(x, (6,))).split(3, -1)
            x = x + torch.cat([torch.sin(b), a * b], -1)
            self.seen.add_(x)
        x = torch.cond(x.sum() > 0, lambda x: x.exp() + x, lambda x: x.sin() * x, (x,))
        return torch.softmax(x, -1) + self.seen, x


def test_a_real_program_gives_the_same_bits(delegate, monkeypatch):
    torch.manual_seed(1)
    module, results, counts = Deep().eval(), {}, {}
    program = torch.export.export(module, (torch.randn(3, 6),))
    for recycled in (False, True):

        def counting(builder):
            made = assemble(builder, recycled=recycled)
            counts[recycled] = made.graph.num_temp_tensors
            return made

        monkeypatch.setattr(preprocess, "assemble", functools.wraps(assemble)(counting))
        edge = to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()])
        loaded = Runtime.get().load_program(edge.to_executorch().buffer)
        method = loaded.load_method("forward")
        xs = [torch.full((3, 6), 0.1), torch.full((3, 6), -0.3)]
        results[recycled] = [t.clone() for x in xs for t in method.execute([x])]
    assert counts[True] * 4 < counts[False]
    for plain, shared, eager in zip(results[False], results[True], [t for x in xs for t in module(x)]):
        assert torch.equal(plain, shared)
        torch.testing.assert_close(shared, eager, rtol=1e-4, atol=1e-4)
