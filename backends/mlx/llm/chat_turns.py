"""Fits the messages of a chat to a template that takes no system message, or only turns that alternate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]
BETWEEN_TURNS = "\n\n"  # of messages that become one
PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": PARAMETERS}}
OPTIONS: dict[str, dict[str, Any]] = {"chat": {}, "tools": {"tools": [TOOL]}}  # a template may depend on them


@dataclass(frozen=True)
class Turns:
    """The orders of messages that a chat template takes, besides users and assistants who alternate.

    - `system`: a system message at the beginning. The templates of Gemma 2 reject it.
    - `later_system`: a system message behind others.
    - `adjacent`: messages of the same role behind each other.
    - `assistant_first`: a message of the assistant at the beginning.
    """

    system: bool = True
    later_system: bool = True
    adjacent: bool = True
    assistant_first: bool = True

    @classmethod
    def of(cls, render: Callable[[Messages, Mapping[str, Any]], str]) -> Turns:
        """Try a template. `render` returns the text of messages, with options such as `tools`, or raises ValueError."""

        def shows(options: Mapping[str, Any], *roles: str) -> bool | None:
            """Whether the template shows messages with these roles. None: it rejects them."""
            contents = [f"<{place}>" for place in range(len(roles))]
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
            try:
                text = render(messages, options)
            except ValueError:
                return None
            return all(content in text for content in contents)

        # With the options that work. A template may show no contents at all. Then it counts what it rejects.
        usual = {key: shows(value, "user", "assistant", "user") for key, value in OPTIONS.items()}
        tried = [(OPTIONS[key], is_shown) for key, is_shown in usual.items() if is_shown is not None]

        def takes(*roles: str) -> bool:
            return all(
                shown if must_show else shown is not None
                for shown, must_show in ((shows(options, *roles), must_show) for options, must_show in tried)
            )

        system = takes("system", "user")
        return cls(
            system=system,
            later_system=system and takes("user", "system") and takes("user", "assistant", "system", "user"),
            adjacent=takes("user", "user") and takes("user", "assistant", "assistant", "user"),
            assistant_first=takes("assistant", "user"),
        )

    def fit(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Return the messages in an order that the template takes.

        System messages that it does not take become the user's. They are joined with the user's messages beside them.
        """
        fitted: list[Mapping[str, Any]] = []
        was_system = False
        for message in messages:
            is_system = message["role"] == "system"
            is_first = not fitted or all(other["role"] == "system" for other in fitted)
            if is_system and not (self.later_system or self.system and is_first):
                message = {**message, "role": "user"}
            joins = not self.adjacent or not self.later_system and (is_system or was_system)
            if fitted and joins and _can_join(fitted[-1], message):
                message = {**fitted[-1], **message, "content": _joined(fitted.pop()["content"], message["content"])}
            fitted.append(message)
            was_system = is_system
        if not self.assistant_first:
            place = next((i for i, message in enumerate(fitted) if message["role"] != "system"), len(fitted))
            if fitted[place:] and fitted[place]["role"] == "assistant":
                fitted.insert(place, {"role": "user", "content": ""})
        return fitted


def _can_join(message: Mapping[str, Any], following: Mapping[str, Any]) -> bool:
    """Whether two messages can become one: texts of the same role, and calls only behind them."""
    has_texts = all(isinstance(one.get("content"), str) for one in (message, following))
    is_same = message["role"] == following["role"] and message["role"] in ("system", "user", "assistant")
    return has_texts and is_same and not message.get("tool_calls")


def _joined(*texts: str) -> str:
    return BETWEEN_TURNS.join(filter(None, texts))
