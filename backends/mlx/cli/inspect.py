"""`executorch-mlx inspect`"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from ..inspect import render_graph, render_text
from ..inspect.portability import file_findings, lines
from ..inspect.pte import Contents, Delegate, ProgramError, read_pte
from ..inspect.report import report
from ..quiet import quiet_imports
from .errors import CommandError


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show the MLX programs in a .pte file",
        description="Show the MLX programs in a .pte file: a summary of each, then the instructions with the names, "
        "shapes and dtypes of their operands and results.",
    )
    parser.add_argument("model", metavar="MODEL.pte", type=Path, help="file to inspect")
    parser.add_argument("--method", metavar="NAME", help="show only this method")
    parser.add_argument("--payload", metavar="DIR", type=Path, help="write each payload to DIR/METHOD.INDEX.mlx")
    output_format = parser.add_mutually_exclusive_group()
    output_format.add_argument("--summary", action="store_true", help="print only the summary")
    output_format.add_argument("--json", action="store_true", help="print everything as JSON")
    output_format.add_argument("--dot", action="store_true", help="print the graph in Graphviz DOT format")
    output_format.add_argument("--svg", action="store_true", help="print the graph as SVG; needs Graphviz")
    output_format.add_argument(
        "--portable",
        action="store_true",
        help="print what ExecuTorch's own MLX delegate would compute differently, one line each; the exit status is 1 "
        "if there is anything",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    try:
        return _show(options)
    except ProgramError as error:
        raise CommandError(str(error)) from error


def _show(options: argparse.Namespace) -> int:
    with quiet_imports():
        contents = read_pte(options.model)
    delegates = _chosen(options.model, contents, options.method)
    if options.portable:
        found = list(lines(file_findings(dataclasses.replace(contents, delegates=delegates))))
        print("\n".join(found) or f"{options.model} is portable")
        return 1 if found else 0
    if options.payload is not None:
        _extract(options.payload, delegates)
        if not (options.summary or options.json or options.dot or options.svg):
            return 0
    tree = report(contents, delegates)
    if options.json:
        print(json.dumps(tree, indent=1))
    elif options.dot:
        print(render_graph.dot(tree["delegates"]), end="")
    elif options.svg:
        print(render_graph.svg(render_graph.dot(tree["delegates"])), end="")
    else:
        print("\n".join(render_text.summary(str(options.model), tree)))
        for delegate in () if options.summary else tree["delegates"]:
            print()
            print("\n".join(render_text.listing(delegate)))
    return 0


def _chosen(path: Path, contents: Contents, method: str | None) -> list[Delegate]:
    """Return the delegates of `method`, or of all methods if it is None. Raises ProgramError if there are none."""
    if method is not None and method not in contents.methods:
        raise ProgramError(f"{path}: no method {method}, expected one of {', '.join(contents.methods)}")
    chosen = [d for d in contents.delegates if method in (None, d.method)]
    if not chosen:
        where = str(path) if method is None else f"method {method} of {path}"
        raise ProgramError(f"{where} has no MLX delegate")
    return chosen


def _extract(folder: Path, delegates: list[Delegate]) -> None:
    """Write the payload of each delegate to a file in `folder`, and print the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for delegate in delegates:
        # The method name comes from the file and may contain path separators.
        name = "".join(c if c.isalnum() or c in "_-" else "_" for c in delegate.method)
        file = folder / f"{name}.{delegate.index}.mlx"
        file.write_bytes(delegate.payload)
        print(f"{file}: {render_text.format_bytes(len(delegate.payload))}")
