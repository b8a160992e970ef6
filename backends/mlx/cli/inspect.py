"""executorch-mlx inspect MODEL.pte"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import picture, text
from .model import quiet
from .pte import Contents, Delegate, ProgramError, read_pte
from .report import report


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show the MLX programs in a .pte",
        description="Shows the MLX programs in a .pte: a summary, then every instruction with names, shapes and dtypes.",
    )
    parser.add_argument("model", metavar="MODEL.pte", type=Path)
    parser.add_argument("--method", metavar="NAME", help="this method only")
    parser.add_argument("--payload", metavar="DIR", type=Path, help="write every program there, as METHOD.INDEX.mlx")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--summary", action="store_true", help="the summary alone")
    kind.add_argument("--json", action="store_true", help="everything, as JSON")
    kind.add_argument("--dot", action="store_true", help="the graph, as text for graphviz")
    kind.add_argument("--svg", action="store_true", help="the graph, as an SVG drawn by graphviz's dot")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    with quiet():
        contents = read_pte(options.model)
    delegates = _chosen(options.model, contents, options.method)
    if options.payload is not None:
        _extract(options.payload, delegates)
        if not (options.summary or options.json or options.dot or options.svg):
            return 0
    tree = report(contents, delegates)
    if options.json:
        print(json.dumps(tree, indent=1))
    elif options.dot:
        print(picture.dot(tree["delegates"]), end="")
    elif options.svg:
        print(picture.svg(picture.dot(tree["delegates"])), end="")
    else:
        print("\n".join(text.summary(str(options.model), tree)))
        for delegate in () if options.summary else tree["delegates"]:
            print()
            print("\n".join(text.listing(delegate)))
    return 0


def _chosen(path: Path, contents: Contents, method: str | None) -> list[Delegate]:
    if method is not None and method not in contents.methods:
        raise ProgramError(f"{path} has no method {method}, it has {', '.join(contents.methods)}")
    chosen = [d for d in contents.delegates if method in (None, d.method)]
    if not chosen:
        where = str(path) if method is None else f"method {method} of {path}"
        raise ProgramError(f"{where} has no MLX delegate")
    return chosen


def _extract(folder: Path, delegates: list[Delegate]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for delegate in delegates:
        # A method's name comes from the file and may be anything, a path too.
        name = "".join(c if c.isalnum() or c in "_-" else "_" for c in delegate.method)
        file = folder / f"{name}.{delegate.index}.mlx"
        file.write_bytes(delegate.payload)
        print(f"{file}: {text.size(len(delegate.payload))}")
