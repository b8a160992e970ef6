"""Draws the report of `report.py` as a graph: DOT source for graphviz, or an SVG."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from .pte import ProgramError
from .render_text import format_attribute

_COLORS = {"constant": "#e8e8e8", "input": "#cfe8cf", "output": "#f6d5c2", "buffer": "#fff1b8"}


def dot(delegates: list[dict[str, Any]]) -> str:
    """Return the DOT source of the graph of `delegates`, which are descriptions from the report.

    A chain is a cluster, and an edge is a tensor or a number with its type.
    """
    lines = [
        "digraph mlx {",
        '  node [shape=box, style="rounded,filled", fillcolor=white, fontname=Helvetica, fontsize=10];',
        "  edge [fontname=Helvetica, fontsize=8];",
        "  compound=true;",
    ]
    for number, delegate in enumerate(delegates):
        lines += _Drawing(f"d{number}", delegate).lines
    return "\n".join([*lines, "}", ""])


def svg(dot_source: str) -> str:
    """Return the SVG drawing of DOT source. Raises ProgramError if graphviz is not installed or fails."""
    program = shutil.which("dot")
    if program is None:
        raise ProgramError("--svg: graphviz's dot is not on PATH; install graphviz, or use --dot")
    drawn = subprocess.run([program, "-Tsvg"], input=dot_source, text=True, capture_output=True, check=False)
    if drawn.returncode != 0:
        raise ProgramError(f"--svg: dot failed with exit code {drawn.returncode}: {drawn.stderr.strip()}")
    return drawn.stdout


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class _Drawing:
    """The DOT lines of one delegate. `prefix` makes its node names unique."""

    def __init__(self, prefix: str, delegate: dict[str, Any]):
        self.prefix = prefix
        self.lines: list[str] = []
        self.tensors = {t["id"]: t for t in delegate["tensors"]}
        outputs = {t["id"] for t in delegate["tensors"] if t["space"] == "output"}
        self.drawn_nodes: set[str] = set()
        self.chains = delegate["chains"]
        self.drawn_chains: set[int] = set()
        self.writers: dict[tuple[str, int], str] = {}  # maps the key of a slot to the node that wrote the slot last
        title = f"{delegate['method']} {delegate['index']}"
        self.lines.append(f"  subgraph cluster_{prefix} {{ label={_quoted(title)};")
        for chain in (delegate["init_chain"], delegate["main_chain"]):
            if chain is not None:
                self._draw_chain(chain)
        for tid in outputs:
            self._draw_edge(self.writers.get(("tensor", tid)), self._draw_tensor(tid), "")
        self.lines.append("  }")

    def _draw_chain(self, index: int) -> None:
        if index in self.drawn_chains or index >= len(self.chains):
            return
        self.drawn_chains.add(index)
        label = _quoted(f"chain {index}")
        self.lines.append(f"  subgraph cluster_{self.prefix}_c{index} {{ label={label}; color=grey;")
        for instruction in self.chains[index]:
            self._draw_instruction(index, instruction)
        self.lines.append("  }")

    def _draw_instruction(self, chain: int, instruction: dict[str, Any]) -> None:
        node = f"{self.prefix}_{chain}_{instruction['index']}"
        notes = [f"{k}={format_attribute(v)}" for k, v in instruction["attributes"].items()]
        label = "\n".join([instruction["op"], *([", ".join(notes)] if notes else [])])
        self.lines.append(f"    {node} [label={_quoted(label)}];")
        for name, value in instruction["operands"].items():
            for slot in value if isinstance(value, list) else [value]:
                if isinstance(slot, dict):
                    self._draw_edge(self._source_of(slot), node, f"{name}: {slot.get('type', 'int')}")
        results = dict.fromkeys(map(_key, instruction["results"]), node)
        # The results are recorded before the inner chains, because a scan writes its slices before its chain reads
        # them. They are recorded again after the inner chains, because those may write the same slots.
        self.writers |= results
        for inner in instruction["chains"]:
            self._draw_chain(inner)
            if inner < len(self.chains) and self.chains[inner]:
                cluster = f"cluster_{self.prefix}_c{inner}"
                self.lines.append(f"    {node} -> {self.prefix}_{inner}_0 [style=dashed, lhead={cluster}];")
        self.writers |= results

    def _source_of(self, slot: dict[str, Any]) -> str:
        """Return the graph node at which an edge from `slot` starts: the last writer, or a node for the slot."""
        kind, number = _key(slot)
        if (kind, number) in self.writers:
            return self.writers[kind, number]
        if kind == "tensor" and number in self.tensors:
            return self._draw_tensor(number)
        node = f"{self.prefix}_{kind}{number}"
        self._draw_node(node, slot["name"], _COLORS["input"])
        return node

    def _draw_tensor(self, tid: int) -> str:
        """Draw a graph node for a tensor, and return its name."""
        tensor = self.tensors[tid]
        node = f"{self.prefix}_t{tid}"
        self._draw_node(node, f"{tensor['name']}\n{tensor['type']}", _COLORS[tensor["space"]])
        return node

    def _draw_node(self, node: str, label: str, color: str) -> None:
        if node not in self.drawn_nodes:
            self.drawn_nodes.add(node)
            self.lines.append(f"    {node} [label={_quoted(label)}, fillcolor={_quoted(color)}];")

    def _draw_edge(self, source: str | None, target: str, label: str) -> None:
        if source is not None:
            self.lines.append(f"    {source} -> {target} [label={_quoted(label)}];")


def _key(slot: dict[str, Any]) -> tuple[str, int]:
    """Return a key that identifies a slot. The id alone does not, because tensor and value slots have separate ids."""
    return ("tensor", slot["tensor"]) if "tensor" in slot else ("value", slot["value"])
