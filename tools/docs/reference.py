"""Writes the generated parts of the reference pages: signatures and docstrings of Python objects, and headers.

python tools/docs/reference.py          # after a change of a signature, a docstring or a public header
python tools/docs/reference.py --check  # exit status 1 if a committed page differs

A part follows a comment and ends with `<!-- end -->`:

- `<!-- object: NAME -->`: a class, function or module. A class is followed by its public methods and
  properties with a docstring, also those of base classes in this package. `<!-- object: NAME members: a, b -->` lists
  them, and `members: none` leaves them out.
- `<!-- file: PATH -->`: a file of the repository.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
PACKAGE = "executorch_mlx"
WIDTH = 100

_PART = re.compile(
    r"^<!-- (?P<kind>object|file): (?P<name>\S+)(?: members: (?P<members>.+?))? -->\n.*?^<!-- end -->$", re.M | re.S
)


def page(text: str) -> str:
    """Return the Markdown of a page with new generated parts."""

    def part(match: re.Match) -> str:
        kind, name, members = match["kind"], match["name"], match["members"]
        body = file_block(name) if kind == "file" else entry(name, members)
        return f"{match[0].splitlines()[0]}\n\n{body}\n\n<!-- end -->"

    return _PART.sub(part, text)


def file_block(path: str) -> str:
    language = {".h": "cpp", ".cpp": "cpp", ".swift": "swift", ".txt": "cmake"}[Path(path).suffix]
    return f"```{language}\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"


def entry(name: str, members: str | None) -> str:
    """Return the heading, the signature and the docstring of an object, and then those of its members."""
    object_ = resolve_name(name if ":" in name else _with_colon(name))
    parts = [f"### `{name}`"]
    parts += [inspect.getdoc(object_) or ""] if inspect.ismodule(object_) else described(object_)
    if inspect.isclass(object_) or inspect.ismodule(object_):
        for member, value in members_of(object_, members):
            parts += [f"#### `{member}`", *described(value)]
    return "\n\n".join(parts)


def _with_colon(name: str) -> str:
    """Return `name` with a colon between the module and the rest, as `resolve_name` tells them apart."""
    path = name.split(".")
    for count in range(len(path) - 1, 0, -1):
        try:
            if inspect.ismodule(resolve_name(".".join(path[:count]) + ":")):
                return ".".join(path[:count]) + ":" + ".".join(path[count:])
        except ModuleNotFoundError:
            continue
    return name


def members_of(object_: Any, listed: str | None) -> Iterator[tuple[str, Any]]:
    if listed == "none":
        return
    if listed is not None:
        yield from ((member, getattr(object_, member)) for member in listed.split(", "))
        return
    owners = [c for c in object_.__mro__ if c.__module__.partition(".")[0] == PACKAGE]
    seen: dict[str, Any] = {}
    for owner in owners:
        for member, value in vars(owner).items():
            if not member.startswith("_") and member not in seen:
                seen[member] = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    yield from ((m, v) for m, v in seen.items() if _is_documented(v))


def _is_documented(value: Any) -> bool:
    is_code = inspect.isroutine(value) or isinstance(value, (property, cached_property))
    return is_code and bool(inspect.getdoc(value))


def described(object_: Any) -> list[str]:
    """Return the signature and the docstring of a class, a function or a property."""
    if isinstance(object_, cached_property):
        object_ = object_.func
    elif isinstance(object_, property):
        object_ = object_.fget
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(object_)))
    node = ast.parse(source).body[0]
    signature = class_signature(source, node) if isinstance(node, ast.ClassDef) else function_signature(source, node)
    doc = inspect.getdoc(object_) if ast.get_docstring(node) or not inspect.isclass(object_) else ""
    docs = [doc or ""]
    if isinstance(node, ast.ClassDef) and (init := _method(node, "__init__")) is not None:
        docs.append(ast.get_docstring(init) or "")
    return [f"```py\n{signature}\n```", *(with_lists(doc) for doc in docs if doc)]


def with_lists(doc: str) -> str:
    """Return a docstring with Markdown lists in place of the sections Args, Returns and Raises."""

    def section(match: re.Match) -> str:
        title, entries = match["title"], textwrap.dedent(match["entries"]).strip()
        if title == "Returns":
            return f"{title}: {entries}\n\n"
        lines = [re.sub(r"^(\S+):", r"- `\1`:", line) for line in entries.splitlines()]
        return f"{title}:\n\n" + "\n".join(re.sub(r"^ {4}", "  ", line) for line in lines) + "\n\n"

    return re.sub(r"^(?P<title>Args|Returns|Raises):\n(?P<entries>(?:    .*\n?|\n)+)", section, doc, flags=re.M).strip()


def class_signature(source: str, node: ast.ClassDef) -> str:
    bases = [ast.unparse(base) for base in node.bases]
    head = "".join(f"@{ast.unparse(d)}\n" for d in node.decorator_list) + f"class {node.name}"
    if (init := _method(node, "__init__")) is not None:
        return function_signature(source, init, head)
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and ast.unparse(item.target)[0] != "_"]
    lines = [f"    {_one_line(source, item)}" for item in fields]
    return "\n".join([f"{head}({', '.join(bases)}):" if bases else f"{head}:", *(lines or ["    ..."])])


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def function_signature(source: str, node: ast.FunctionDef | ast.AsyncFunctionDef, head: str = "") -> str:
    """Return the source of a signature, on one line or with a line for each parameter."""
    marks = ("property", "classmethod", "staticmethod", "contextmanager")
    decorators = [f"@{name}\n" for d in node.decorator_list if (name := ast.unparse(d)).rpartition(".")[2] in marks]
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    start = head or f"{''.join(decorators)}{keyword} {node.name}"
    end = f" -> {_one_line(source, node.returns)}" if node.returns and not head else ""
    parameters = list(_parameters(source, node.args))
    signature = f"{start}({', '.join(parameters)}){end}"
    if len(signature.splitlines()[-1]) <= WIDTH:
        return signature
    return "\n".join([f"{start}(", *(f"    {parameter}," for parameter in parameters), f"){end}"])


def _parameters(source: str, args: ast.arguments) -> Iterator[str]:
    """Yield the parameters of a signature as text, without `self` and `cls`."""

    def shown(arg: ast.arg, default: ast.expr | None = None, prefix: str = "") -> str:
        text = prefix + _one_line(source, arg)
        if default is None:
            return text
        return f"{text} = {_one_line(source, default)}" if arg.annotation else f"{text}={_one_line(source, default)}"

    positional = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(positional) - len(args.defaults)), *args.defaults]
    for index, (arg, default) in enumerate(zip(positional, defaults)):
        if index or arg.arg not in ("self", "cls"):
            yield shown(arg, default)
        if args.posonlyargs and index == len(args.posonlyargs) - 1 and arg.arg not in ("self", "cls"):
            yield "/"
    if args.vararg:
        yield shown(args.vararg, prefix="*")
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults):
        yield shown(arg, default)
    if args.kwarg:
        yield shown(args.kwarg, prefix="**")


def _one_line(source: str, node: ast.AST) -> str:
    return re.sub(r"\s+", " ", ast.get_source_segment(source, node) or "")


def main() -> int:
    pages = {path: (text, page(text)) for path in PAGES if _PART.search(text := path.read_text(encoding="utf-8"))}
    changed = {path: new for path, (old, new) in pages.items() if new != old}
    if "--check" in sys.argv[1:]:
        return int(bool(changed))
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
