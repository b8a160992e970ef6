"""Calls in the syntax of Python: `[get_weather(city="Oslo"), now()]`. Only literals are read, nothing is executed."""

from __future__ import annotations

import ast

from .base import ToolCall


def read(text: str) -> list[ToolCall]:
    """Return the calls in `text`. Raises ValueError if it has anything but calls with literal keyword arguments."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"expected calls: {error}") from error
    nodes = body.elts if isinstance(body, (ast.List, ast.Tuple)) else [body]
    return [_call(node) for node in nodes]


def _call(node: ast.AST) -> ToolCall:
    # print(call()) occurs in the examples of Gemma.
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and len(node.args) == 1
    ):
        node = node.args[0]
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("expected a call with keyword arguments")
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"got {name}, expected the name of a function")
    return ToolCall.of(name, {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords})
