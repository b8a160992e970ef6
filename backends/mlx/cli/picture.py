"""A program as a graph: graphviz's text, or an SVG that `dot` draws."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from .pte import ProgramError
from .text import _attribute

_COLOURS = {"constant": "#e8e8e8", "input": "#cfe8cf", "output": "#f6d5c2", "buffer": "#fff1b8"}


def dot(delegates: list[dict[str, Any]]) -> str:
    """One cluster a chain; an edge is a tensor or a number, labelled with its type."""
    lines = ["digraph mlx {", '  node [shape=box, style="rounded,filled", fillcolor=white, fontname=Helvetica, fontsize=10];']
    lines += ["  edge [fontname=Helvetica, fontsize=8];", "  compound=true;"]
    for number, delegate in enumerate(delegates):
        lines += _Drawing(f"d{number}", delegate).lines
    return "\n".join([*lines, "}", ""])


def svg(text: str) -> str:
    """What graphviz's `dot` makes of `text`; ProgramError where it is not installed."""
    program = shutil.which("dot")
    if program is None:
        raise ProgramError("--svg needs graphviz's dot, which is not on PATH: install graphviz, or use --dot")
    drawn = subprocess.run([program, "-Tsvg"], input=text, text=True, capture_output=True, check=False)
    if drawn.returncode != 0:
        raise ProgramError(f"dot ended with {drawn.returncode}: {drawn.stderr.strip()}")
    return drawn.stdout


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class _Drawing:
    def __init__(self, prefix: str, delegate: dict[str, Any]):
        self.prefix = prefix
        self.lines: list[str] = []
        self.tensors = {t["id"]: t for t in delegate["tensors"]}
        self.outputs = {t["id"] for t in delegate["tensors"] if t["space"] == "output"}
        self.drawn: set[str] = set()
        self.chains = delegate["chains"]
        self.open: set[int] = set()
        self.makers: dict[tuple[str, int], str] = {}  # slot → the node that wrote it last
        title = f"{delegate['method']} {delegate['index']}"
        self.lines.append(f"  subgraph cluster_{prefix} {{ label={_quoted(title)};")
        for chain in (delegate["init_chain"], delegate["main_chain"]):
            if chain is not None:
                self._chain(chain)
        for tid in self.outputs:
            self._edge(self.makers.get(("tensor", tid)), self._tensor(tid), "")
        self.lines.append("  }")

    def _chain(self, index: int) -> None:
        if index in self.open or index >= len(self.chains):
            return
        self.open.add(index)
        self.lines.append(f"  subgraph cluster_{self.prefix}_c{index} {{ label={_quoted(f'chain {index}')}; color=grey;")
        for instruction in self.chains[index]:
            self._instruction(index, instruction)
        self.lines.append("  }")

    def _instruction(self, chain: int, instruction: dict[str, Any]) -> None:
        node = f"{self.prefix}_{chain}_{instruction['index']}"
        notes = [f"{k}={_attribute(v)}" for k, v in instruction["attributes"].items()]
        label = "\n".join([instruction["op"], *([", ".join(notes)] if notes else [])])
        self.lines.append(f"    {node} [label={_quoted(label)}];")
        for name, value in instruction["operands"].items():
            for slot in value if isinstance(value, list) else [value]:
                if isinstance(slot, dict):
                    self._edge(self._maker(slot), node, f"{name}: {slot.get('type', 'int')}")
        for inner in instruction["chains"]:
            self._chain(inner)
            if inner < len(self.chains) and self.chains[inner]:
                frame = f"cluster_{self.prefix}_c{inner}"
                self.lines.append(f"    {node} -> {self.prefix}_{inner}_0 [style=dashed, lhead={frame}];")
        for slot in instruction["results"]:
            self.makers[_key(slot)] = node

    def _maker(self, slot: dict[str, Any]) -> str:
        kind, number = _key(slot)
        if (kind, number) in self.makers:
            return self.makers[kind, number]
        if kind == "tensor" and number in self.tensors:
            return self._tensor(number)
        node = f"{self.prefix}_{kind}{number}"
        self._node(node, slot["name"], _COLOURS["input"])
        return node

    def _tensor(self, tid: int) -> str:
        tensor = self.tensors[tid]
        node = f"{self.prefix}_t{tid}"
        self._node(node, f"{tensor['name']}\n{tensor['type']}", _COLOURS[tensor["space"]])
        return node

    def _node(self, node: str, label: str, colour: str) -> None:
        if node not in self.drawn:
            self.drawn.add(node)
            self.lines.append(f"    {node} [label={_quoted(label)}, fillcolor={_quoted(colour)}];")

    def _edge(self, source: str | None, target: str, label: str) -> None:
        if source is not None:
            self.lines.append(f"    {source} -> {target} [label={_quoted(label)}];")


def _key(slot: dict[str, Any]) -> tuple[str, int]:
    return ("tensor", slot["tensor"]) if "tensor" in slot else ("value", slot["value"])
