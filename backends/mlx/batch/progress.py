"""The progress bar of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .run import Totals


@contextmanager
def progress(done: int, total: int) -> Iterator[Callable[[Totals], None]]:
    """A context manager: shows on stderr how many of `total` requests are answered, and an estimate of the time left.

    `done` is the number of requests that earlier runs have answered. Yields a function that shows the totals of this
    run. Without a terminal, nothing is shown.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    start = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=120) as bar:
        task = bar.add_task("answers", total=total, completed=done, tokens="")

        def show(totals: Totals) -> None:
            rate = totals.answer_tokens / max(time.monotonic() - start, 1e-9)
            errors = f", {totals.errors} errors" if totals.errors else ""
            bar.update(task, completed=done + totals.answers, tokens=f"{rate:.0f} tokens/s{errors}")

        yield show
