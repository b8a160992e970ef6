"""`executorch-mlx batch`"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..batch import AnswerFile, RequestLines, Totals, Workers, answer_all, count_and_check
from ..batch.table_file import CSV, PARQUET, Table, TableRequests, open_table, write_table
from ..llm.export_options import TEXT
from . import adapter_arguments, model_arguments, store
from .errors import CommandError
from .extras import check_installed

JSON_LINES = ".jsonl"
TABLES = (CSV, PARQUET)


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer the requests in a file in OpenAI's batch format (.jsonl), or the prompts in a column of a "
        "table (.csv, .parquet). Run the same command again to resume a batch that was interrupted: requests that are "
        "answered already are not answered again.",
    )
    model_arguments.add_to(parser)
    add = parser.add_argument
    add("input", metavar="REQUESTS", type=Path, help="file with the requests: .jsonl, .csv or .parquet")
    add(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        type=Path,
        help="file for the answers: .jsonl, or .csv or .parquet with the rows of a table and the answers as columns",
    )
    add("--name", help="name of the model in the requests (default: the hub id, or the name of the folder or file)")
    add(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="spread the requests over the machines of a Ray cluster (default ADDRESS: the running cluster, or a new "
        "one on this machine)",
    )
    table = parser.add_argument_group("tables")
    table.add_argument("--column", metavar="NAME", help="column with the prompts")
    table.add_argument(
        "--answer-column",
        metavar="NAME",
        default="answer",
        help="column for the answers; the column NAME_error has the error if there is no answer (default: %(default)s)",
    )
    table.add_argument(
        "--chat", action="store_true", help="treat the prompts as chat messages: apply the chat template"
    )
    table.add_argument("--system", metavar="TEXT", help="system message of every chat")
    table.add_argument(
        "--embed", action="store_true", help="MODEL is an encoder: compute the embeddings of the texts in the column"
    )
    table.add_argument(
        "--body",
        metavar="JSON",
        type=_parse_json_object,
        default={},
        help='further fields of every request, such as \'{"max_tokens": 100, "temperature": 0}\'',
    )
    parser.set_defaults(run=run)


def _parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object")
    return value


def run(options: argparse.Namespace) -> int:
    _check_installed(options)
    with _file_errors():
        table, requests = _open_requests(options)
        _check_output(options, table)
        is_table = options.output.suffix in TABLES
        # A table cannot be appended to. Its answers are collected in a .jsonl file until all requests are answered.
        path = options.output.with_name(f"{options.output.name}{JSON_LINES}") if is_table else options.output
        if is_table and options.output.exists() and not path.exists():
            raise CommandError(f"{options.output} exists: delete it, or choose another file for the answers")
        with AnswerFile(path) as answers:
            totals = _answer(options, requests, answers)
            num_requests = len(answers.answered)
            if is_table:
                write_table(table, path, options.output, options.answer_column, options.embed)
                path.unlink()
    print(f"{options.output}: {_summary(totals, num_requests)}", file=sys.stderr)
    return 0


def _check_installed(options: argparse.Namespace) -> None:
    check_installed("batch", "serve", ("fastapi", "rich"))
    if PARQUET in (options.input.suffix, options.output.suffix):
        if find_spec("pyarrow") is None:
            raise CommandError("batch needs pyarrow for Parquet files: pip install pyarrow")
    if options.ray is not None:
        check_installed("batch", "ray", ("ray",))
        if adapter_arguments.named(options):
            raise CommandError("--adapter: got --ray as well, whose engines load no adapters")
        if options.device is not None:
            raise CommandError("--device: got --ray as well, which runs a model on the GPU of a machine that has one")


@contextmanager
def _file_errors() -> Iterator[None]:
    """A context manager: turns the errors of files and workers into errors of the command."""
    try:
        yield
    except BlockingIOError as error:
        raise CommandError("another process writes the answers: wait until it ends") from error
    except (ValueError, RuntimeError) as error:
        raise CommandError(str(error)) from error


# Files -----------------------------------------------------------------------------------


def _open_requests(options: argparse.Namespace) -> tuple[Table | None, RequestLines | TableRequests]:
    """Return the table, or None for a .jsonl file, and the requests. Raises CommandError if the options are invalid."""
    suffix = options.input.suffix
    if suffix not in (JSON_LINES, *TABLES):
        raise CommandError(f"{options.input}: got the suffix {suffix!r}, expected .jsonl, .csv or .parquet")
    given = {"--chat": options.chat, "--column": options.column, "--body": options.body, "--system": options.system}
    given["--embed"] = options.embed
    if suffix == JSON_LINES:
        if unused := [name for name, value in given.items() if value]:
            raise CommandError(f"{unused[0]}: expected a table (.csv or .parquet), got {options.input}")
        return None, RequestLines(options.input)
    if options.system is not None and not options.chat:
        raise CommandError("--system: expected --chat as well")
    if options.embed and options.chat:
        raise CommandError("--embed: got --chat as well, expected one of them")
    table = open_table(options.input)
    if options.column not in table.columns:
        got = "no --column" if options.column is None else f"--column {options.column}"
        raise CommandError(f"{options.input}: got {got}, expected one of {', '.join(table.columns)}")
    if options.body.get("stream"):
        raise CommandError("--body: stream: expected false in a batch")
    adapters = adapter_arguments.named(options)
    fields = {"model": adapters[0].name if len(adapters) == 1 else _name(options)} | options.body
    return table, TableRequests(table, options.column, options.chat, options.system, fields, options.embed)


def _check_output(options: argparse.Namespace, table: Table | None) -> None:
    suffix = options.output.suffix
    expected = (JSON_LINES,) if table is None else (JSON_LINES, *TABLES)
    if suffix not in expected:
        raise CommandError(f"-o {options.output}: got the suffix {suffix!r}, expected {' or '.join(expected)}")
    if options.output.exists() and options.output.samefile(options.input):
        raise CommandError(f"-o {options.output}: expected another file than that of the requests")
    if suffix in TABLES:
        for name in (options.answer_column, f"{options.answer_column}_error"):
            if name in table.columns:
                raise CommandError(f"--answer-column: {options.input} has a column {name} already")


def _name(options: argparse.Namespace) -> str:
    return options.name or store.name_of(options.model)


# The batch -------------------------------------------------------------------------------


def _answer(options: argparse.Namespace, requests: RequestLines | TableRequests, answers: AnswerFile) -> Totals:
    """Answer the requests that have no answer yet, and return the totals of this run."""
    total = count_and_check(requests, answers)
    done, totals = set(answers.answered.values()), Totals()
    if len(done) == total:
        return totals

    async def work() -> None:
        from ..batch.progress import progress

        async with _workers(options) as workers:
            with progress(len(done), total) as show:

                def write(answer: dict[str, Any]) -> None:
                    answers.write(answer)
                    totals.add(answer)
                    show(totals)

                await answer_all((request for request in requests if request.id not in done), workers, write)

    asyncio.run(work())
    return totals


@asynccontextmanager
async def _workers(options: argparse.Namespace) -> AsyncIterator[Workers]:
    if options.ray is not None:
        from ..ray.engine import ModelOptions
        from ..ray.engines import ray_engines

        tokenizer = options.tokenizer and options.tokenizer.resolve()
        path = model_arguments.find_model(options.model, options, TEXT).path.resolve()
        model = ModelOptions(path, _name(options), tokenizer, options.memory_limit)
        async with ray_engines(model, options.ray) as engines:
            yield engines
        return
    from ..serve.local_worker import local_worker

    with model_arguments.load_any(options) as loaded:
        async with local_worker(loaded, _name(options)) as worker:
            yield worker


def _summary(totals: Totals, num_requests: int) -> str:
    if not totals.answers:
        return f"all {num_requests} requests are answered already"
    return (
        f"{totals.answers} of {num_requests} requests answered in this run, {totals.errors} with an error; "
        f"{totals.prompt_tokens} prompt tokens, {totals.answer_tokens} generated tokens"
    )
