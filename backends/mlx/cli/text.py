"""The report in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def size(nbytes: int | None) -> str:
    """Bytes as people write them: 786.4 kB."""
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


def summary(path: str, tree: dict[str, Any]) -> Iterator[str]:
    file = tree["file"]
    yield f"{path}: {size(file['bytes'])}, methods: {', '.join(file['methods'])}"
    for method, calls in tree["outside"].items():
        yield f"  {method} runs outside MLX: " + ", ".join(f"{name} x{count}" for name, count in calls.items())
    for delegate in tree["delegates"]:
        yield ""
        yield from _delegate(delegate)


def _delegate(d: dict[str, Any]) -> Iterator[str]:
    chains = len(d["chains"])
    yield f"{d['method']}, MLX program {d['index']}: {size(d['payload_bytes'])}"
    yield f"  inputs        {_slots(d['inputs'])}"
    yield f"  outputs       {_slots(d['outputs'])}"
    init = "" if d["init_chain"] is None else f", chain {d['init_chain']} at load"
    yield f"  instructions  {d['instructions']} in {chains} chain{'s' * (chains != 1)}{init}"
    yield f"  constants     {d['constants']['count']}, {size(d['constants']['bytes'])}"
    yield f"  buffers       {d['buffers']['count']}, {size(d['buffers']['bytes'])}"
    temporaries = d["temporaries"]
    unknown = temporaries["of_unknown_size"]
    apart = f" without {unknown} of unknown size" if unknown else ""
    yield f"  temporaries   {temporaries['count']}, peak about {size(temporaries['peak_bytes'])}{apart}"
    yield f"  values        {d['values']}"
    yield "  ops           " + ", ".join(f"{op} {count}" for op, count in d["ops"].items())


def _slots(slots: list[dict[str, str]]) -> str:
    return ", ".join(f"{s['slot']}: {s['type']}" for s in slots) or "none"


def listing(delegate: dict[str, Any]) -> Iterator[str]:
    """The tensors that are not temporary, and every instruction."""
    yield f"{delegate['method']}, MLX program {delegate['index']}, tensors"
    for tensor in delegate["tensors"]:
        bounds = ", ".join(f"{low}..{high if high is not None else ''}" for low, high in filter(None, tensor["bounds"] or ()))
        notes = [size(tensor["bytes"])] + ([f"? is {bounds}"] if bounds else [])
        yield f"  %{tensor['id']:<4} {tensor['space']:<9} {tensor['name']}: {tensor['type']}  ({'; '.join(notes)})"
    for index, chain in enumerate(delegate["chains"]):
        role = {delegate["main_chain"]: ", runs at every call", delegate["init_chain"]: ", runs at load"}.get(index, "")
        yield ""
        yield f"{delegate['method']}, MLX program {delegate['index']}, chain {index}{role}"
        for instruction in chain:
            yield "  " + line(instruction)


def line(instruction: dict[str, Any]) -> str:
    """`12  %7: float32[2, 8] = Add(a=x, b=weight)`"""
    results = ", ".join(f"{r['name']}: {r['type']}" for r in instruction["results"])
    arguments = [f"{name}={_operand(value)}" for name, value in instruction["operands"].items()]
    arguments += [f"{name}={_attribute(value)}" for name, value in instruction["attributes"].items()]
    arguments += [f"chain {index}" for index in instruction["chains"]]
    return f"{instruction['index']:>4}  {results}{' = ' if results else ''}{instruction['op']}({', '.join(arguments)})"


def _operand(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_operand, value))}]"
    return value["name"] if isinstance(value, dict) else _attribute(value)


def _attribute(value: Any) -> str:
    if isinstance(value, str):
        return value if len(value) <= 40 else f"{value[:37]!r}..."
    return f"{value:g}" if isinstance(value, float) else str(value)
