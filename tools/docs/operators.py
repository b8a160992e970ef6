"""Writes docs/operators.md: the operators that lower, by family, from the registry.

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
TITLES = {"kv_cache": "KV cache", "linalg": "Linear algebra", "conv": "Convolution", "quant": "Quantized weights"}

INTRODUCTION = """\
# Supported operators

<!-- Written by tools/docs/operators.py. Do not edit. -->

{operators} operators with {overloads} overloads lower to MLX: each has a handler that emits instructions, or a torch
function that is traced. Operators that `torch.export` decomposes into these lower as well. All others run on
ExecuTorch's own kernels; [Undelegated nodes](undelegated-nodes.md) tells how to find them in a model.

Operators are ATen's unless a namespace says otherwise. Dtypes are bool, int8 to int64, uint8 to uint64, float16,
bfloat16 and float32. Dimensions may be dynamic. *Declined* lists the cases that a handler refuses, as `explain()`
reports them; `…` stands for a value.
"""

EXTENSIONS = """\
## Extensions

ExecuTorch's own MLX delegate lacks these IR nodes. An operator that needs one lowers with
`MLXPartitioner(allow_extensions=True)` only: {}.
"""


def registered() -> dict[str, list]:
    """Family → its targets, in the order of registration."""
    families: dict[str, list] = defaultdict(list)
    prefix = f"{executorch_mlx.__name__}.ops."
    add = REGISTRY.add

    def noted(targets, handler):
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
        del REGISTRY.add
    return families


def name_of(target) -> tuple[str, str]:
    """The name of an operator, without `aten`, and its overload."""
    if isinstance(target, (torch._ops.OpOverload, str)):
        namespace, name, overload = str(target).split(".")
        return name if namespace == "aten" else f"{namespace}::{name}", overload
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.{target}", ""
    return f"{target.__module__.lstrip('_')}.{target.__name__}", ""


def listing(targets: list) -> str:
    """Operators in alphabetical order, ATen's first; the overload follows the name unless it is the default one."""
    names = sorted(map(name_of, targets), key=lambda n: ("::" in n[0], "." in n[0], n[0].lstrip("_"), n[1]))
    return ", ".join(f"`{name}`" if overload in ("", "default") else f"`{name}.{overload}`" for name, overload in names)


def declined(family: str) -> list[str]:
    """The reasons in the family's source, with … for what is filled in."""
    reasons = []
    for node in ast.walk(ast.parse((PACKAGE / "ops" / f"{family}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Unsupported":
            (reason,) = node.args
            parts = reason.values if isinstance(reason, ast.JoinedStr) else [reason]
            reasons.append("".join(p.value if isinstance(p, ast.Constant) else "…" for p in parts))
    return list(dict.fromkeys(reasons))


def summary(module: str) -> str:
    """The first sentence of a module's docstring."""
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
    lines += ["## Patterns", "", "Several nodes that lower to one instruction, or to a few:", ""]
    lines += ["| pattern | |", "|---|---|"]
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
