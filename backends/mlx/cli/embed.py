"""`executorch-mlx embed`"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.export_options import ENCODER
from . import model_arguments
from .errors import CommandError

if TYPE_CHECKING:
    from ..encoders import Encoder

JSON_LINES, NUMPY, PARQUET, TEXT = ".jsonl", ".npy", ".parquet", ".txt"
TEXTS_AT_A_TIME = 4096
COLUMN, VECTOR = "text", "embedding"  # the names of fields and columns


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "embed",
        help="compute embeddings of texts or pictures with an encoder",
        description="Compute embeddings of texts or pictures with an encoder. Texts are arguments, the lines of "
        "standard input, or those of a file. Without -o, each embedding is a line of JSON.",
    )
    add = parser.add_argument
    model_arguments.add_model(parser)
    add("texts", metavar="TEXT", nargs="*", help="texts (default: the lines of standard input)")
    add("--input", metavar="FILE", type=Path, help="file with texts: lines of .txt, objects in .jsonl, or a .parquet")
    add("--column", metavar="NAME", default=COLUMN, help="field or column with the texts (default: %(default)s)")
    add("--image", metavar="FILE", type=Path, action="append", default=[], help="picture; may be repeated")
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help=f"file for the embeddings: .npy, .jsonl or .parquet, the last two with the fields of the input and "
        f"{VECTOR!r}",
    )
    add("--prompt", metavar="TEXT", help="text that precedes each text (default: the default prompt of the model)")
    add("--prompt-name", metavar="NAME", help="name of a prompt of the model, such as query or document")
    add("--dimensions", metavar="N", type=int, help="keep the first N values of each embedding (Matryoshka)")
    add(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="divide embeddings by their length (default: as the model does)",
    )
    model_arguments.add_device(parser)
    model_arguments.add_export_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check(options)
    write = _writer(options.output)
    model = model_arguments.find_model(options.model, options, ENCODER)
    from ..encoders import Encoder

    with model_arguments.loading(model.path):
        encoder = Encoder(model.path, device=options.device)
    with encoder:
        try:
            count = write(_results(encoder, options))
        except (ValueError, RuntimeError) as error:
            raise CommandError(str(error)) from error
    if options.output is not None:
        print(f"{options.output}: {count} embeddings", file=sys.stderr)
    return 0


def _check(options: argparse.Namespace) -> None:
    given = [
        name
        for name, value in (("TEXT", options.texts), ("--input", options.input), ("--image", options.image))
        if value
    ]
    if len(given) > 1:
        raise CommandError(f"{given[1]}: got {given[0]} as well, expected one of them")
    if options.input is not None and options.input.suffix not in (TEXT, JSON_LINES, PARQUET):
        raise CommandError(
            f"{options.input}: got the suffix {options.input.suffix!r}, expected .txt, .jsonl or .parquet"
        )
    if options.output is not None and options.output.suffix not in (NUMPY, JSON_LINES, PARQUET):
        raise CommandError(
            f"-o {options.output}: got the suffix {options.output.suffix!r}, expected .npy, .jsonl or .parquet"
        )
    if options.output is not None and not options.output.parent.is_dir():
        raise CommandError(f"-o {options.output}: expected a file in an existing folder")
    if PARQUET in [path.suffix for path in (options.input, options.output) if path] and find_spec("pyarrow") is None:
        raise CommandError("embed needs pyarrow for Parquet files: pip install pyarrow")
    if options.image and find_spec("PIL") is None:
        raise CommandError("embed needs Pillow for pictures: pip install 'executorch-mlx[vision]'")


# Input ---------------------------------------------------------------------------------


def _results(encoder: Encoder, options: argparse.Namespace) -> Iterator[tuple[list[dict[str, Any]], Any]]:
    """Yield the fields of some inputs, and their embeddings [N, D]."""
    names = ("prompt", "prompt_name", "dimensions", "normalize")
    settings = {name: getattr(options, name) for name in names}
    if options.image:
        images = [{"image": str(path)} for path in options.image]
        yield images, encoder.encode(images=options.image, **settings)
        return
    for rows in _rows(options):
        texts = [row.get(options.column) for row in rows]
        if wrong := next((text for text in texts if not isinstance(text, str)), None) or None in texts:
            got = "none" if wrong is True else f"{wrong!r}"[:80]
            raise CommandError(f"--column: {options.column}: got {got}, expected text in each row")
        yield rows, encoder.encode(texts, **settings)


def _rows(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the inputs, `TEXTS_AT_A_TIME` of them at a time."""
    if options.input is not None and options.input.suffix == PARQUET:
        from ..batch.table_file import open_table

        table = open_table(options.input)
        if options.column not in table.columns:
            raise CommandError(f"--column: got {options.column}, expected one of {', '.join(table.columns)}")
        rows: Iterable[dict[str, Any]] = table.rows()
    elif options.texts:
        rows = ({options.column: text} for text in options.texts)
    else:
        rows = _lines(options.input, options.column)
    remaining = iter(rows)
    while part := list(islice(remaining, TEXTS_AT_A_TIME)):
        yield part


def _lines(path: Path | None, column: str) -> Iterator[dict[str, Any]]:
    file = sys.stdin if path is None else open(path, encoding="utf-8")
    with file:
        for number, line in enumerate(file, 1):
            text = line.rstrip("\n")
            if path is None or path.suffix == TEXT:
                yield {column: text}
                continue
            try:
                row = json.loads(text)
            except ValueError as error:
                raise CommandError(f"{path}: line {number}: {error}") from error
            if not isinstance(row, dict):
                raise CommandError(f"{path}: line {number}: got {text[:80]}, expected an object")
            yield row


# Output --------------------------------------------------------------------------------

Results = Iterator[tuple[list[dict[str, Any]], Any]]


def _writer(path: Path | None) -> Callable[[Results], int]:
    """Return the function that writes embeddings, and returns their number. A file appears when it is complete."""
    if path is None:
        return lambda results: _write_lines(results, sys.stdout)
    write = {NUMPY: _write_numpy, JSON_LINES: _write_json_lines, PARQUET: _write_parquet}[path.suffix]

    def write_whole(results: Results) -> int:
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            count = write(results, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return count

    return write_whole


def _write_lines(results: Results, file: Any) -> int:
    count = 0
    for rows, vectors in results:
        for row, vector in zip(rows, vectors.tolist(), strict=True):
            print(
                json.dumps(row | {VECTOR: vector}, ensure_ascii=False, default=str), file=file, flush=file is sys.stdout
            )
        count += len(rows)
    return count


def _write_json_lines(results: Results, path: Path) -> int:
    with open(path, "w", encoding="utf-8") as file:
        return _write_lines(results, file)


def _write_numpy(results: Results, path: Path) -> int:
    import numpy

    parts = [vectors for _, vectors in results]
    vectors = numpy.concatenate(parts) if parts else numpy.zeros((0, 0), numpy.float32)
    with open(path, "wb") as file:
        numpy.save(file, vectors)
    return len(vectors)


def _write_parquet(results: Results, path: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    count, writer = 0, None
    try:
        for rows, vectors in results:
            table = pyarrow.Table.from_pylist(rows)
            values = pyarrow.array(vectors.reshape(-1))
            table = table.append_column(VECTOR, pyarrow.FixedSizeListArray.from_arrays(values, vectors.shape[1]))
            writer = writer or pyarrow.parquet.ParquetWriter(path, table.schema)
            writer.write_table(table.cast(writer.schema))
            count += len(rows)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise CommandError(f"-o {path}: got no texts")
    return count
