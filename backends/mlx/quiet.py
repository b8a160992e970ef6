"""Hides messages of dependencies that mean nothing to the user.

A message is recognized by its beginning. All other messages still appear. The user's log levels, handlers and warning
filters stay as they are.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Logger → the beginning of a message that importing torchao logs as a warning.
_TORCHAO_MESSAGES = {
    "torchao": "Failed to load ",  # its CUDA kernels, on a machine without CUDA or with another Python
    "torch.utils._pytree": "%s is an Enum subclass",  # torch deprecates a call that torchao makes
}


@contextmanager
def quiet_imports() -> Iterator[None]:
    """A context manager for imports: reduces the warnings that the import of torchao logs to debug level.

    ExecuTorch and transformers import torchao. This package uses none of the kernels that torchao fails to load.
    """
    filters = {logging.getLogger(name): _to_debug_level(name, start) for name, start in _TORCHAO_MESSAGES.items()}
    for logger, demote in filters.items():
        logger.addFilter(demote)
    try:
        yield
    finally:
        for logger, demote in filters.items():
            logger.removeFilter(demote)


def _to_debug_level(name: str, start: str) -> Callable[[logging.LogRecord], bool]:
    """Return a filter for the logger `name` that reduces messages that begin with `start` to debug level."""

    def demote(record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(start):
            return True
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return logging.getLogger(name).isEnabledFor(logging.DEBUG)

    return demote


@contextmanager
def quiet_lowering() -> Iterator[None]:
    """A context manager for lowering: ignores the warning that torch gives when ExecuTorch copies an exported program.

    Like `warnings.catch_warnings`, it is not thread-safe.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        yield
