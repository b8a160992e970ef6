"""executorch-mlx run MODEL.pte"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import model

if TYPE_CHECKING:
    from ..llm import LLM, Generation

INTERRUPTED = 130  # what a shell makes of Ctrl-C

# Each is off where it is not given, and refused where the program cannot honour it.
SETTINGS = (
    ("temperature", float, "0, the default, is greedy"),
    ("top_k", int, "only the K most likely tokens"),
    ("top_p", float, "only the most likely tokens that together reach this probability"),
    ("min_p", float, "only tokens with this share of the probability of the most likely one"),
    ("seed", int, "the same seed, the same text; a random one by default"),
    ("repetition_penalty", float, "above 1: divides the logits of tokens that occurred"),
    ("presence_penalty", float, "subtracted from the logits of tokens that occurred"),
    ("frequency_penalty", float, "subtracted once for every time that a token occurred"),
    ("max_new_tokens", int, "by default until the answer ends or the context is full"),
)
HELP = "/clear begins a new chat, /exit or the end of the input leaves, Ctrl-C ends an answer"


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="run a language model",
        description="Prints what a language model answers as it comes; metrics go to stderr. Without --prompt it is a "
        f"chat: {HELP}. Ends with {INTERRUPTED} if Ctrl-C ended the one answer.",
    )
    model.add_to(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this and leave; - reads it from stdin")
    parser.add_argument("--chat", action="store_true", help="the prompt is a message of a chat: apply the chat template")
    parser.add_argument("--system", metavar="TEXT", help="the system message of the chat")
    parser.add_argument("--stop", metavar="TEXT", action="append", default=[], help="end before this text; may be repeated")
    for name, kind, text in SETTINGS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=text)
    parser.add_argument("--json", action="store_true", help="every answer as one line of JSON: text, tokens, finish, seed, metrics")
    parser.add_argument("--profile", metavar="FILE", help="time every instruction, for ExecuTorch's Inspector; slower")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    chat = options.chat or options.prompt is None
    if options.system is not None and not chat:
        raise model.CommandError("--system belongs to a chat: add --chat")
    llm = model.load(options)
    session = Session(llm, options, chat)
    if chat and not llm.chats:
        raise model.CommandError(f"{options.model} has no chat template: give a --prompt without --chat, or a --tokenizer with one")
    try:
        if options.prompt is None:
            return converse(session)
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
        return INTERRUPTED if session.answer(prompt) == "cancelled" else 0
    finally:
        if options.profile:
            llm.program.write_profile(options.profile)


class Session:
    """A chat, or single prompts, with one model."""

    def __init__(self, llm: LLM, options: argparse.Namespace, chat: bool):
        self.llm, self.json, self.chat = llm, options.json, chat
        self.settings: dict[str, Any] = {"stop": options.stop}
        for name, *_ in SETTINGS:
            if (value := getattr(options, name)) is not None:
                self.settings[name] = value
        self._system = options.system
        self.clear()

    def clear(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def answer(self, text: str) -> str | None:
        """Prints the answer to `text`; why it ended."""
        try:
            generation = self._begin(text)
        except ValueError as error:
            raise model.CommandError(str(error)) from error
        with ctrl_c_cancels(generation):
            for token in generation:
                if not self.json and token.text:
                    print(token.text, end="", flush=True)
        if self.chat:
            self.messages.append({"role": "assistant", "content": generation.text})
        self._report(generation)
        return generation.finish

    def _begin(self, text: str) -> Generation:
        if not self.chat:
            return self.llm.generate(text, **self.settings)
        asked = [*self.messages, {"role": "user", "content": text}]
        generation = self.llm.chat(asked, **self.settings)
        self.messages = asked
        return generation

    def _report(self, generation: Generation) -> None:
        if self.json:
            names = ("text", "tokens", "finish", "seed")
            told = {name: getattr(generation, name) for name in names}
            print(json.dumps(told | {"metrics": generation.metrics.as_dict()}), flush=True)
            return
        print(flush=True)
        seed = "" if generation.seed is None or not self.settings.get("temperature") else f"; seed {generation.seed}"
        print(f"[{generation.finish}; {generation.metrics}{seed}]", file=sys.stderr, flush=True)


def converse(session: Session) -> int:
    """Answers line after line until the input ends; what cannot be answered is said and passed over."""
    for line in lines():
        match line.strip():
            case "":
                pass
            case "/exit":
                break
            case "/clear":
                session.clear()
            case "/help":
                print(HELP, file=sys.stderr)
            case text if text.startswith("/"):
                print(f"{text.split()[0]} is no command; {HELP}", file=sys.stderr)
            case text:
                try:
                    session.answer(text)
                except model.CommandError as error:
                    print(f"executorch-mlx: {error}", file=sys.stderr)
                    if not sys.stdin.isatty():
                        return 1
    return 0


def lines() -> Iterator[str]:
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  (the keys of a terminal, for input())

    print(HELP, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            return


@contextmanager
def ctrl_c_cancels(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C ends the answer after the step that is on its way, a second one at once."""

    def handler(number, frame):
        generation.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
