"""Writes the seed corpus of the fuzz targets.

    python test/libfuzzer/corpus.py

corpus/payload has one payload for each table of the schema and a few larger programs. corpus/pte has whole files.
"""

import sys
from pathlib import Path

import torch

TEST = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TEST), str(TEST / "engine")]
import llm_programs  # noqa: E402
from irprograms import FLOAT32, INT32, Graph, ir, lit, lits, number, value_of  # noqa: E402
from irprograms.examples import EXAMPLES  # noqa: E402
from irprograms.node_case import build, inputs_and_outputs  # noqa: E402
from irprograms.node_cases import CASES  # noqa: E402

CORPUS = Path(__file__).parent / "corpus"


def loops() -> Graph:
    """A while loop, a scan, a branch, and arithmetic on values."""
    g = Graph()
    x, out = g.input((4, 2)), g.output((4, 2))
    count, carry, part = g.new_temp(), g.new_temp(), g.new_temp()
    go, limit, size, value = g.new_temp(), g.new_temp(), g.new_value(), g.new_value()
    condition = g.chain(ir.LessNode(a=count, b=limit, out=go), ir.ItemIntNode(x=go, out=value))
    body = g.chain(ir.AddNode(a=count, b=limit, out=count), ir.MultiplyNode(a=carry, b=carry, out=carry))
    scanned = g.chain(ir.ExpNode(x=part, out=part))
    branch = g.chain(ir.NegNode(x=carry, out=carry))
    g.emit(
        ir.SymSizeNode(a=x, dim=0, out=size),
        ir.ModIntNode(a=value_of(size), b=lit(3), out=size),
        ir.FullNode(out=count, shape=[], v=number(0), scalar_type=INT32),
        ir.FullNode(out=limit, shape=[], v=number(2), scalar_type=INT32),
        ir.IdCopyNode(x=x, out=carry),
        ir.WhileNode(cond_chain_idx=condition, cond=value_of(value), body_chain_idx=body, carry=[count, carry]),
        ir.IfNode(cond=value_of(size), then_chain_idx=branch, else_chain_idx=scanned),
        ir.ScanNode(originals=[carry], sliced=[part], outputs=[part], carry=[], body_chain_idx=scanned, scan_axis=0),
        ir.AddNode(a=carry, b=part, out=out),
    )
    g.output_value(size)
    return g


def cache() -> Graph:
    """The runtime's own KV cache, a mutable buffer, and an init chain."""
    g = Graph()
    q, position = g.input((1, 2, (1, 3), 4)), g.input(((1, 3), 1), torch.int64)
    buffer, weight = g.buffer((2, 4)), g.constant(torch.ones(2, 4))
    attended = g.output((1, 2, (1, 3), 4))
    for layer in (0, 1):
        g.emit(ir.UpdateAndAttendNode(q=q, k=q, v=q, position=position, out=attended, layer_id=layer, scale=0.5))
    g.emit(
        ir.SliceUpdateNode(dst=buffer, update=weight, out=buffer, axis=lit(0), start=lit(0), stop=lit(2)),
        ir.RopeNode(x=q, out=g.new_temp(), dims=4, offset=ir.VidOrTid(vid=g.new_value(), is_vid=True)),
        ir.SumNode(x=buffer, out=g.output(())),
    )
    g.init_chain = g.chain(ir.FullLikeNode(x=weight, out=buffer, v=number(1), scalar_type=FLOAT32))
    return g


def experts() -> Graph:
    """Products with matrices that indices select."""
    g = Graph()
    x, chosen = g.input((3, 1, 32)), g.input((3,), torch.int64)
    dense = g.constant(torch.ones(2, 32, 8))
    w = g.constant(torch.ones(2, 8, 4, dtype=torch.uint32))
    scales, biases = (g.constant(torch.ones(2, 8, 1)) for _ in "sb")
    g.emit(
        ir.GatherMmNode(a=x, b=dense, out=g.output((3, 1, 8)), rhs_indices=chosen),
        ir.GatherQmmNode(
            x=x,
            w=w,
            scales=scales,
            biases=biases,
            rhs_indices=chosen,
            out=g.output((3, 1, 8)),
            group_size=32,
            bits=4,
            mode="affine",
            transpose=True,
        ),
        ir.RandomBitsNode(out=g.output((4,), torch.uint32), shape=lits(4), seed=g.new_value()),
    )
    return g


def programs() -> dict[str, Graph]:
    """The programs of the corpus by name."""
    torch.manual_seed(0)
    found = {name: make()[0] for name, make in EXAMPLES.items()}
    found |= {"loops": loops(), "cache": cache(), "experts": experts()}
    tables = set()
    for case in CASES:
        fields = tuple((f.name, f.type) for f in case.node.FIELDS)
        if fields not in tables:
            tables.add(fields)
            inputs, outputs = inputs_and_outputs(case, case.dtypes[0])
            found[case.node.NAME] = build(case, inputs, outputs)
    return found


def files() -> dict[str, bytes]:
    """The contents of the corpus by path."""
    graphs = programs()
    payloads = {f"payload/{name}": graph.payload() for name, graph in graphs.items()}
    return payloads | {f"pte/{name}": graphs[name].pte() for name in ("decoder", "loops", "cache")}


def write_llm(path: Path) -> None:
    """Write a program for the LLM runner. It returns the last token of its input."""
    bytes_of = [bytes([i]) for i in range(8)]
    llm_programs.export(
        path, lambda self, tokens, input_pos, **_: tokens[:, -1], vocabulary=bytes_of, vocab_size=8, optional=()
    )


def write() -> None:
    for name, contents in files().items():
        path = CORPUS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    write_llm(CORPUS / "pte" / "llm")


if __name__ == "__main__":
    write()
