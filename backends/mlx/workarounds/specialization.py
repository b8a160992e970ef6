"""Refuses traces that fix or restrict dynamic dimensions.

torch specializes a dynamic dimension without a word if a function depends on its size: the graph is then valid for the
size of the example only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..extents import range_of


class Specialized(Exception):
    """A trace would fix the size of a dynamic dimension, or restrict its range."""


@contextmanager
def no_specialization(fake_mode: Any) -> Iterator[None]:
    """Within the context, raise `Specialized` where tracing would fix the size of a dynamic dimension.

    Also raises it at the end of the context, if tracing has restricted the range of a dynamic dimension. After an
    exception, the shape environment has no guard, axiom or range that tracing added.
    """
    env = fake_mode.shape_env
    if env is None:
        yield
        return

    set_replacement = env._set_replacement

    def refuse(symbol: Any, value: Any, message: str) -> None:
        if message == "find":  # shortens a chain of replacements that already exist
            return set_replacement(symbol, value, message)
        raise Specialized(f"specialize the dynamic dimension {symbol} to {value}")

    guards, axioms, ranges = len(env.guards), dict(env.axioms), dict(env.var_to_range)
    env._set_replacement = refuse
    try:
        yield
        _refuse_restriction(ranges, env.var_to_range)
    except BaseException:
        del env.guards[guards:]
        for table, before in ((env.axioms, axioms), (env.var_to_range, ranges)):
            table.clear()
            table.update(before)
        raise
    finally:
        env._set_replacement = set_replacement


def _refuse_restriction(before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """Raise `Specialized` if the range of a dynamic dimension has become smaller."""
    for symbol, values in before.items():
        old, new = range_of(values), range_of(after[symbol])
        if old != new:
            raise Specialized(f"restrict the dynamic dimension {symbol} from {list(old)} to {list(new)}")
