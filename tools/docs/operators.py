"""Writes docs/operators.md: the supported operators by family, from the registry.

python tools/docs/operators.py          # after a change in ops/ or patterns/
python tools/docs/operators.py --check  # exit status 1 if the committed page differs
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections import defaultdict
from pathlib import Path

import executorch_mlx
import torch
from executorch_mlx.builder.registry import REGISTRY
from executorch_mlx.serialization import ir

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(executorch_mlx.__file__).parent
PAGE = ROOT / "docs" / "operators.md"
TITLES = {
    "kv_cache": "KV cache",
    "linalg": "Linear algebra",
    "conv": "Convolution",
    "quant": "Quantized weights",
    "rnn": "Recurrent layers",
}

INTRODUCTION = """\
# Supported operators

<!-- Written by tools/docs/operators.py. Do not edit. -->

{operators} operators with {overloads} overloads can be delegated to MLX. Each of them has a handler that emits
instructions, or a torch function that is traced. Operators that `torch.export` decomposes into these can be delegated
too. All other operators run on ExecuTorch's own kernels. [Undelegated nodes](undelegated-nodes.md) explains how to find
such operators in a model.

An operator without a namespace is an ATen operator. The supported dtypes are bool, int8 to int64, uint8 to uint64,
float16, bfloat16 and float32. Dimensions may be dynamic. *Declined* lists the reasons for which a handler declines a
node, as `explain()` reports them; `…` stands for a value.
"""

EXTENSIONS = """\
## Extensions

ExecuTorch's own MLX delegate lacks these IR nodes: {}. An operator that needs one of them is delegated only with
`MLXPartitioner(allow_extensions=True)`.
"""


def registered() -> dict[str, list]:
    """Import all families, and return a map from each family to its targets in the order of their registration."""
    families: dict[str, list] = defaultdict(list)
    prefix = f"{executorch_mlx.__name__}.ops."
    add = REGISTRY.add

    def noted(targets, handler):
        # The family is the module of `ops` that called REGISTRY.add, directly or through a decorator.
        frame = sys._getframe(1)
        while not frame.f_globals["__name__"].startswith(prefix):
            frame = frame.f_back
        family = frame.f_globals["__name__"].removeprefix(prefix)
        families[family] += targets if isinstance(targets, (list, tuple, set)) else [targets]
        return add(targets, handler)

    REGISTRY.add = noted
    try:
        importlib.import_module(prefix.rstrip("."))
    finally:
        del REGISTRY.add  # the attribute of the instance, which hid the method
    return families


def name_of(target) -> tuple[str, str]:
    """Return the name of an operator, without the namespace `aten`, and the name of the overload."""
    if isinstance(target, (torch._ops.OpOverload, str)):
        namespace, name, overload = str(target).split(".")
        return name if namespace == "aten" else f"{namespace}::{name}", overload
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.{target}", ""
    return f"{target.__module__.lstrip('_')}.{target.__name__}", ""


def listing(targets: list) -> str:
    """Return the operators as Markdown, in alphabetical order with ATen operators first.

    The name of the overload follows the name of the operator, except for the default overload.
    """
    names = sorted(map(name_of, targets), key=lambda n: ("::" in n[0], "." in n[0], n[0].lstrip("_"), n[1]))
    return ", ".join(f"`{name}`" if overload in ("", "default") else f"`{name}.{overload}`" for name, overload in names)


def declined(family: str) -> list[str]:
    """Return the reasons for which the family's handlers raise `Unsupported`, with … in place of inserted values."""
    reasons = []
    for node in ast.walk(ast.parse((PACKAGE / "ops" / f"{family}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Unsupported":
            (reason,) = node.args
            parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
            reasons.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in parts))
    return list(dict.fromkeys(reasons))


def summary(module: str) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")))
    return re.split(r"(?<=[^.]\.) (?=[A-Z])", " ".join(text.split("\n\n")[0].split()))[0]


def page() -> str:
    families = registered()
    names = {name_of(target)[0] for targets in families.values() for target in targets}
    count = sum(map(len, families.values()))
    lines = [INTRODUCTION.format(operators=len(names), overloads=count)]
    for family in sorted(families):
        lines += [f"## {TITLES.get(family, family.replace('_', ' ').capitalize())}", "", summary(f"ops/{family}"), ""]
        lines.append(listing(families[family]))
        if reasons := declined(family):
            lines += ["", "Declined:", "", *(f"- {reason}" for reason in reasons)]
        lines.append("")
    lines += ["## Patterns", "", "Patterns lower several nodes together, to one instruction or a few:", ""]
    lines += ["| pattern | description |", "|---|---|"]
    for file in sorted((PACKAGE / "patterns").glob("[a-z]*.py")):
        lines.append(f"| `{file.stem}` | {summary(f'patterns/{file.stem}').replace('|', chr(92) + '|')} |")
    extensions = [op.NAME for op in ir.OPS.values() if op.OP_TYPE >= ir.FIRST_EXTENSION]
    lines += ["", EXTENSIONS.format(", ".join(f"`{name}`" for name in extensions))]
    return "\n".join(lines)


def main() -> int:
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
