"""The errors of the commands, and their exit codes."""

INTERRUPTED = 130  # the exit code that shells use for Ctrl-C


class CommandError(Exception):
    """An error to report to the user in one line, without a traceback."""


class ReportedError(Exception):
    """An error that another process has reported to the user. `code` is the exit code of that process."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code
