"""The errors of the commands, and their exit codes."""

INTERRUPTED = 130  # the exit code that shells use for Ctrl-C


class CommandError(Exception):
    """An error to report to the user in one line, without a traceback."""


def reason(error: Exception) -> str:
    """Return the text of an error for people: that of an OSError begins with the path, without its number."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


class ReportedError(Exception):
    """An error that another process has reported to the user. `code` is the exit code of that process."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code
