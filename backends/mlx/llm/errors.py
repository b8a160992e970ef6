"""Errors about one field: raised with what the field got and what it expects, and rendered where people read them."""

from __future__ import annotations


class FieldError(ValueError):
    """Raised for a value that a field cannot have.

    `name` is the name of the field in the Python API. `got` and `expected` say what it got, and what it expects. If
    there is more to say, `problem` replaces both. The message is the name, a colon, and the `problem`.
    """

    def __init__(self, name: str, got: object = None, expected: str = "", *, problem: str = ""):
        self.name, self.got, self.expected = name, got, expected
        self.problem = problem or f"got {got}, expected {expected}"
        super().__init__(self.about(name))

    def about(self, name: str) -> str:
        """Return the message for a reader who knows the field as `name`: a flag, or the field of a request."""
        return f"{name}: {self.problem}"


class SettingError(FieldError):
    """Raised for a setting that is invalid, or that the program does not support.

    `name` is the setting's name, and `problem` the message without it: what was got, and what was expected.
    """


class PromptLengthError(FieldError):
    """Raised for a prompt that is empty, or longer than the context: `count` tokens, with room for `longest`.

    `count` is None for a prompt that is so long that its tokens were not counted. `problem` is the message without the
    name of the argument.
    """

    def __init__(self, count: int | None, longest: int):
        self.count, self.longest = count, longest
        got = f"more than {longest}" if count is None else count
        super().__init__("prompt", f"{got} tokens", f"1 to {longest}")


class OptionError(FieldError):
    """Raised for an invalid option of an export. `needs` names another option and the values it needs, or is None."""

    def __init__(self, name: str, got: object, expected: str, needs: str | None = None):
        super().__init__(name, got, expected)
        self.needs = needs
