"""Formats the report of `report.py` as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any


def format_bytes(nbytes: int | None) -> str:
    """Return a size as text for people, such as "786.4 kB"; "? B" for None."""
    if nbytes is None:
        return "? B"
    if nbytes < 1000:
        return f"{nbytes} B"
    amount = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB"):
        amount /= 1000
        if amount < 999.95 or unit == "TB":
            break
    return f"{amount:.1f} {unit}"


def summary(path: str, report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the summary of a file."""
    file = report["file"]
    yield f"{path}: {format_bytes(file['bytes'])}, methods: {', '.join(file['methods'])}"
    for method, calls in report["outside"].items():
        yield f"  {method}, outside MLX: " + ", ".join(f"{name} x{count}" for name, count in calls.items())
    for delegate in report["delegates"]:
        yield ""
        yield from _delegate_lines(delegate)


def _delegate_lines(d: dict[str, Any]) -> Iterator[str]:
    chains = len(d["chains"])
    yield f"{d['method']}, MLX program {d['index']}: {format_bytes(d['payload_bytes'])}"
    yield f"  inputs        {_format_slots(d['inputs'])}"
    yield f"  outputs       {_format_slots(d['outputs'])}"
    init = "" if d["init_chain"] is None else f"; chain {d['init_chain']} runs at load"
    yield f"  instructions  {d['instructions']} in {chains} chain{'s' * (chains != 1)}{init}"
    yield f"  constants     {d['constants']['count']}, {format_bytes(d['constants']['bytes'])}"
    yield f"  buffers       {d['buffers']['count']}, {format_bytes(d['buffers']['bytes'])}"
    temporaries = d["temporaries"]
    unknown = temporaries["of_unknown_size"]
    excluded = f", excluding {unknown} of unknown size" if unknown else ""
    yield f"  temporaries   {temporaries['count']}, peak about {format_bytes(temporaries['peak_bytes'])}{excluded}"
    yield f"  host values   {d['values']}"
    yield f"  ops           {_format_counts(d['ops'])}"
    if d["replacements"]:
        replaced = sum(r["count"] for r in d["replacements"])
        by = Counter(r["instruction"]["op"] for r in d["replacements"])
        yield f"  replaced      {replaced} of the instructions, by {_format_counts(dict(by.most_common()))}"


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _format_slots(slots: list[dict[str, str]]) -> str:
    return ", ".join(f"{s['slot']}: {s['type']}" for s in slots) or "none"


def listing(delegate: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that list the tensors of an MLX program, except temporaries, and all of its instructions."""
    title = f"{delegate['method']}, MLX program {delegate['index']}"
    yield f"{title}, tensors"
    for tensor in delegate["tensors"]:
        bounds = [f"{low}..{'' if high is None else high}" for low, high in filter(None, tensor["bounds"] or ())]
        notes = [format_bytes(tensor["bytes"])] + ([f"? is {', '.join(bounds)}"] if bounds else [])
        yield f"  %{tensor['id']:<4} {tensor['space']:<9} {tensor['name']}: {tensor['type']}  ({'; '.join(notes)})"
    for index, chain in enumerate(delegate["chains"]):
        roles = {delegate["main_chain"]: ", runs in every call", delegate["init_chain"]: ", runs at load"}
        yield ""
        yield f"{title}, chain {index}{roles.get(index, '')}"
        for replacement in delegate["replacements"]:
            if replacement["chain"] == index:
                yield "  " + _format_replacement(replacement)
        for instruction in chain:
            yield "  " + format_instruction(instruction)


def format_instruction(instruction: dict[str, Any]) -> str:
    """Return an instruction as text, such as `12  %7: float32[2, 8] = Add(a=x, b=weight)`."""
    results = ", ".join(f"{r['name']}: {r['type']}" for r in instruction["results"])
    arguments = [f"{name}={_format_operand(value)}" for name, value in instruction["operands"].items()]
    arguments += [f"{name}={format_attribute(value)}" for name, value in instruction["attributes"].items()]
    arguments += [f"chain {index}" for index in instruction["chains"]]
    return f"{instruction['index']:>4}  {results}{' = ' if results else ''}{instruction['op']}({', '.join(arguments)})"


def _format_replacement(replacement: dict[str, Any]) -> str:
    """Return a line such as `in place of 12 to 140, the MLX delegate of this project runs Sample(logits=%7)`."""
    first, last = replacement["first"], replacement["first"] + replacement["count"] - 1
    instruction = replacement["instruction"]
    arguments = ", ".join(f"{name}={_format_operand(value)}" for name, value in instruction["operands"].items())
    return f"in place of {first} to {last}, the MLX delegate of this project runs {instruction['op']}({arguments})"


def _format_operand(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_format_operand, value))}]"
    return value["name"] if isinstance(value, dict) else format_attribute(value)


def format_attribute(value: Any) -> str:
    """Return an attribute as text. Long strings are shortened."""
    if isinstance(value, str):
        return value if len(value) <= 40 else f"{value[:37]!r}..."
    return f"{value:g}" if isinstance(value, float) else str(value)
