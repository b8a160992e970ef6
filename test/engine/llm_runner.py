"""Runs the C++ program mlx_llm_runner as a user does."""

import json
import re
import subprocess

from cpp_programs import find_program


class Run:
    """A finished run of mlx_llm_runner."""

    def __init__(self, *arguments: object, stdin: str | None = None):
        command = [find_program("mlx_llm_runner"), *arguments]
        done = subprocess.run(list(map(str, command)), capture_output=True, timeout=120, input=stdin and stdin.encode())
        self.code = done.returncode
        self.stdout = done.stdout.decode()
        self.stderr = done.stderr.decode()

    @property
    def ids(self) -> list[int]:
        """The output of --ids."""
        assert self.code == 0, self.stderr
        return [int(line) for line in self.stdout.split()]

    @property
    def text(self) -> str:
        """The text, without the final newline."""
        assert self.code == 0, self.stderr
        assert self.stdout.endswith("\n")
        return self.stdout[:-1]

    @property
    def json(self) -> list[dict]:
        """The output of --json."""
        assert self.code == 0, self.stderr
        return [json.loads(line) for line in self.stdout.splitlines()]

    @property
    def finish(self) -> str:
        """The finish reason on stderr."""
        found = re.search(r"^finish: (.*)$", self.stderr, re.MULTILINE)
        assert found, f"exit status {self.code}, no finish reason in {self.stderr!r}"
        return found[1]
