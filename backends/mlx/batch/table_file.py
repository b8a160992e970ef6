"""Reads prompts from a column of a CSV or Parquet file, and writes the rows with the answers as further columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from .answer_file import read_answers
from .request_file import LineError, Request, request_id, request_number

CSV, PARQUET = ".csv", ".parquet"
ROWS_AT_A_TIME = 1024  # rows of a table in memory at once
MAX_CELL = 64 * 2**20  # characters in a cell of a CSV file

Row = dict[str, Any]


class Table(Protocol):
    """A table that is read row by row. `columns`: the names of the columns."""

    path: Path
    columns: list[str]

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        """Yield the rows: with all columns if `columns` is None, else with these columns."""


def open_table(path: Path) -> Table:
    """Open a CSV or Parquet file.

    Raises ValueError if the file is not a table, ModuleNotFoundError if pyarrow is needed and not installed, and
    OSError if the file cannot be read.
    """
    return _CsvTable(path) if path.suffix == CSV else _ParquetTable(path)


class _CsvTable:
    def __init__(self, path: Path):
        self.path = path
        self.columns = list(next(self._lines(), ([],))[0])
        if not self.columns or len(set(self.columns)) < len(self.columns):
            raise ValueError(f"{path}: got the columns {self.columns}, expected a first line with different names")

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        for cells, line in islice(self._lines(), 1, None):
            if len(cells) != len(self.columns):
                raise ValueError(f"{self.path}: line {line} has {len(cells)} cells, expected {len(self.columns)}")
            row = dict(zip(self.columns, cells))
            yield row if columns is None else {name: row[name] for name in columns}

    def _lines(self) -> Iterator[tuple[list[str], int]]:
        csv.field_size_limit(MAX_CELL)
        with open(self.path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            try:
                for cells in reader:
                    if cells:
                        yield cells, reader.line_num
            except csv.Error as error:
                raise ValueError(f"{self.path}: line {reader.line_num + 1}: {error}") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{self.path}: {error}") from error


class _ParquetTable:
    def __init__(self, path: Path):
        import pyarrow.parquet

        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: not a Parquet file: {error}") from error
        self.schema = self._file.schema_arrow
        self.columns = list(self.schema.names)

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield the rows as record batches of pyarrow."""
        return self._file.iter_batches(ROWS_AT_A_TIME, columns=None if columns is None else list(columns))

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[Row]:
        for batch in self.batches(columns):
            yield from batch.to_pylist()


@dataclass(frozen=True)
class TableRequests:
    """A request for each row of a table.

    - `column`: the name of the column with the prompts. Without `chat`, a prompt is text or a list of token ids. With
      `chat`, it is the text of a user message or a list of messages.
    - `chat`: whether the prompts are chat messages.
    - `system`: the system message of every chat, or None.
    - `fields`: the fields of every request body besides the prompt, among them `model`.
    - `embed`: whether the requests ask for embeddings of the prompts.
    """

    table: Table
    column: str
    chat: bool
    system: str | None
    fields: dict[str, Any]
    embed: bool = False

    @property
    def path(self) -> Path:
        return self.table.path

    def ids(self) -> Iterator[str]:
        return (request.id for request in self)

    def __iter__(self) -> Iterator[Request]:
        url = "/v1/embeddings" if self.embed else "/v1/chat/completions" if self.chat else "/v1/completions"
        for number, row in enumerate(self.table.rows([self.column]), 1):
            value, error = row[self.column], None
            try:
                body = json.dumps(self.fields | self._prompt(value)).encode()
            except TypeError:  # JSON cannot represent the value, such as bytes or a date
                body = repr(value).encode()
                error = LineError(f"{self.column}: got {type(value).__name__}, expected text or a list")
            yield Request(request_id(number, body), f"row-{number}", url, body, error)

    def _prompt(self, value: Any) -> dict[str, Any]:
        if self.embed:
            return {"input": value}
        if not self.chat:
            return {"prompt": value}
        messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {"messages": [*system, *messages]}


# The answers as columns ----------------------------------------------------------------


def write_table(table: Table, answers: Path, output: Path, column: str, embed: bool = False) -> None:
    """Write the rows of `table` to `output`, with the answers of the file `answers` as further columns.

    The column `column` has the text of the answer, or if `embed` its embedding, a list of numbers. If a request has no
    answer, the column `column` + `_error` has the error message. `output` appears when it is complete. Raises OSError
    if it cannot be written.
    """
    offsets = {request_number(answer["id"]): offset for offset, answer in read_answers(answers)}
    with open(answers, "rb") as file:

        def results_and_errors() -> Iterator[tuple[Any, str | None]]:
            for number in range(1, len(offsets) + 1):
                file.seek(offsets[number])
                yield result_and_error(json.loads(file.readline()))

        unfinished = output.with_name(f"{output.name}.unfinished")
        names = (column, f"{column}_error")
        if output.suffix == CSV:
            _write_csv(table, results_and_errors(), names, unfinished)
        else:
            _write_parquet(table, results_and_errors(), names, unfinished, embed)
    unfinished.replace(output)


def result_and_error(answer: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the text or the embedding of an answer and None, or None and the error message.

    If the answer has several choices, or a choice without text, its text is the JSON of the choices.
    """
    if answer["error"] is not None:
        return None, answer["error"]["message"]
    body = answer["response"]["body"]
    if answer["response"]["status_code"] != 200:
        return None, body["error"]["message"]
    if "data" in body:
        return body["data"][0]["embedding"], None
    choices = body["choices"]
    text = choices[0]["text"] if "text" in choices[0] else choices[0]["message"].get("content")
    return (text if len(choices) == 1 and text is not None else json.dumps(choices)), None


def _write_csv(table: Table, answers: Iterable[tuple], names: tuple[str, str], path: Path) -> None:
    with open(path, "w", encoding="utf-8", newline="", errors="surrogatepass") as file:
        writer = csv.writer(file)
        writer.writerow([*table.columns, *names])
        for row, answer in zip(table.rows(), answers, strict=True):
            writer.writerow([_cell(value) for value in (*row.values(), *answer)])


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, default=str)


def _write_parquet(table: Table, answers: Iterable[tuple], names: tuple[str, str], path: Path, embed: bool) -> None:
    import pyarrow
    import pyarrow.parquet

    answers = iter(answers)
    result = pyarrow.list_(pyarrow.float32()) if embed else pyarrow.string()
    answer_fields = [pyarrow.field(name, kind) for name, kind in zip(names, (result, pyarrow.string()))]
    text_fields = [pyarrow.field(name, pyarrow.string()) for name in table.columns]
    table_fields = table.schema if isinstance(table, _ParquetTable) else text_fields
    schema = pyarrow.schema([*table_fields, *answer_fields])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for columns in _column_chunks(table):
            results, errors = zip(*islice(answers, len(columns[0])), strict=True)
            added = [pyarrow.array(results, result), pyarrow.array(errors, pyarrow.string())]
            writer.write_batch(pyarrow.record_batch([*columns, *added], schema=schema))


def _column_chunks(table: Table) -> Iterator[list[Any]]:
    """Yield the columns of the table as arrays of pyarrow, `ROWS_AT_A_TIME` rows at a time."""
    import pyarrow

    if isinstance(table, _ParquetTable):
        yield from (batch.columns for batch in table.batches())
        return
    rows = table.rows()
    while group := list(islice(rows, ROWS_AT_A_TIME)):
        yield [pyarrow.array([row[name] for row in group], pyarrow.string()) for name in table.columns]
