"""Answers on the command line: a single one, or those of a chat. `run` and `chat` use them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import adapter_arguments, model_arguments, sampling_arguments
from .errors import INTERRUPTED, CommandError

if TYPE_CHECKING:
    from ..llm import LLM, Generation

CHAT_HELP = (
    "/clear starts a new chat, /image FILE and /audio FILE add a picture or a sound to the next message, "
    "/exit or end of input quits, Ctrl-C stops an answer"
)
MEDIA = {"image": "picture", "audio": "sound"}  # a kind of part of messages → what it is


def has_media(options: argparse.Namespace) -> bool:
    return any(getattr(options, kind) for kind in MEDIA)


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of an answer."""
    model_arguments.add_to(parser)
    add = parser.add_argument
    add("--system", metavar="TEXT", help="system message of the chat")
    for kind, thing in MEDIA.items():
        add(
            f"--{kind}",
            metavar="FILE",
            type=Path,
            action="append",
            default=[],
            help=f"a {thing} for the first message, which is a chat message then; may be repeated",
        )
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="stop string: the answer ends before it; may be repeated",
    )
    sampling_arguments.add_to(parser)
    add(
        "--json", action="store_true", help="print each answer as one line of JSON: text, tokens, finish, seed, metrics"
    )
    add(
        "--prompt-cache",
        metavar="FILE",
        type=Path,
        help="read the KV cache of a prompt from FILE, so that prompts that begin like it start sooner; if FILE does "
        "not exist, write the KV cache of the first prompt to it",
    )
    add("--profile", metavar="FILE", help="time every instruction for ExecuTorch's Inspector; slower")


def answer(options: argparse.Namespace, prompt: str | None, chat: bool | None) -> int:
    """Answer `prompt`, or the lines of standard input if it is None. Returns the exit code.

    `chat`: whether these are messages of a chat. None: if the model has a chat template.
    """
    settings = sampling_arguments.given(options)  # before the model is loaded
    if options.prompt_cache and has_media(options):
        raise CommandError("--prompt-cache: expected a prompt without --image and --audio")
    adapters = adapter_arguments.named(options)
    if len(adapters) > 1:
        raise CommandError(f"--adapter: got {len(adapters)} adapters, expected one")
    settings["adapter"] = adapters[0].name if adapters else None
    llm = model_arguments.load(options, profile=options.profile is not None)
    session = Session(llm, options, settings, llm.chats if chat is None else chat)
    if chat and not llm.chats:
        raise CommandError(
            f"{options.model} has no chat template: use run with --prompt and --no-chat, or a --tokenizer with a "
            "template"
        )
    if options.prompt_cache and options.prompt_cache.exists():
        with command_errors():
            llm.load_prefix(options.prompt_cache)
    try:
        if prompt is None:
            return converse(session)
        text = sys.stdin.read() if prompt == "-" else prompt
        return INTERRUPTED if session.answer(text) == "cancelled" else 0
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input: {error}") from error
    finally:
        if options.profile:
            llm.program.write_profile(options.profile)


class Session:
    """Answers prompts with one model: as the turns of a chat if `chat`, else each on its own."""

    def __init__(self, llm: LLM, options: argparse.Namespace, settings: dict[str, Any], chat: bool):
        self.llm, self.json, self.chat = llm, options.json, chat
        self.settings = llm.defaults | settings | {"stop": options.stop}
        self._system = options.system
        self._media = [(kind, path) for kind in MEDIA for path in getattr(options, kind)]
        self._new_cache: Path | None = options.prompt_cache  # to write after the first answer
        if self._new_cache is not None and self._new_cache.exists():
            self._new_cache = None
        self.clear()

    def clear(self) -> None:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def add_media(self, kind: str, path: str) -> None:
        """Add a picture or a sound to the next message. `kind` is one of MEDIA."""
        self._media.append((kind, Path(path)))

    def answer(self, prompt: str) -> str | None:
        """Print the answer to `prompt` and return the finish reason of the answer.

        After an error, the chat goes on without this prompt.
        """
        parts = [{"type": kind, kind: str(path)} for kind, path in self._media]
        content = [*parts, {"type": "text", "text": prompt}] if parts else prompt
        messages = [*self.messages, {"role": "user", "content": content}]
        with command_errors(is_long=bool(self.chat and self.messages)):
            if self.chat:
                generation = self.llm.chat(messages, **self.settings)
            else:
                generation = self.llm.generate(prompt, **self.settings)
            self._stream(generation)
        self._media = []
        if self.chat:
            self.messages = [*messages, {"role": "assistant", "content": generation.text}]
        self._report(generation)
        if self._new_cache is not None:
            with command_errors():
                self.llm.save_prefix(generation.prompt, self._new_cache, adapter=self.settings["adapter"])
            self._new_cache = None
        return generation.finish

    def _stream(self, generation: Generation) -> None:
        with cancel_on_ctrl_c(generation):
            for token in generation:
                if not self.json and token.text:
                    print(token.text, end="", flush=True)

    def _report(self, generation: Generation) -> None:
        if self.json:
            answer = {name: getattr(generation, name) for name in ("text", "tokens", "finish", "seed")}
            print(json.dumps(answer | {"metrics": generation.metrics.as_dict()}), flush=True)
            return
        print(flush=True)
        is_random = generation.seed is not None and self.settings.get("temperature")
        seed = f"; seed {generation.seed}" if is_random else ""
        print(f"[{generation.finish}; {generation.metrics}{seed}]", file=sys.stderr, flush=True)


def converse(session: Session) -> int:
    """Answer each line of the input until the input ends. Returns the exit code.

    On a terminal, the chat continues after an error. Otherwise the first error ends it.
    """
    for line in read_lines():
        match line.strip():
            case "":
                pass
            case "/exit":
                break
            case "/clear":
                session.clear()
            case "/help":
                print(CHAT_HELP, file=sys.stderr)
            case text if text.startswith(tuple(f"/{kind} " for kind in MEDIA)):
                kind, _, path = text.removeprefix("/").partition(" ")
                session.add_media(kind, path.strip())
            case text if text.startswith("/"):
                print(f"unknown command {text.split()[0]}; {CHAT_HELP}", file=sys.stderr)
            case text:
                try:
                    session.answer(text)
                except CommandError as error:
                    print(f"executorch-mlx: {error}", file=sys.stderr)
                    if not sys.stdin.isatty():
                        return 1
    return 0


def read_lines() -> Iterator[str]:
    """Yield the lines of standard input. On a terminal, Ctrl-C discards the line that is being typed."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  (line editing for input())

    print(CHAT_HELP, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            return


@contextmanager
def command_errors(is_long: bool = False) -> Iterator[None]:
    """A context manager: turns the errors of a request into errors of the command. `is_long`: the chat has turns."""
    from ..llm import PromptLengthError

    try:
        yield
    except PromptLengthError as error:
        hint = ". The chat has filled the context: /clear starts a new one" if is_long else ""
        raise CommandError(f"{error}{hint}") from error
    except BrokenPipeError:  # nobody reads the answer: `main` ends the command without a word
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise CommandError(str(error)) from error


@contextmanager
def cancel_on_ctrl_c(generation: Generation) -> Iterator[None]:
    """A context manager: the first Ctrl-C ends the answer after the current step, the second one immediately."""

    def handler(number, frame):
        generation.cancel()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
