"""`executorch-mlx run`"""

from __future__ import annotations

import argparse

from . import session
from .errors import INTERRUPTED, CommandError


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="generate text with a language model",
        description="Generate text with a language model. The answer streams to stdout, metrics go to stderr. If the "
        "model has a chat template, the prompt is a message of a chat, else the beginning of a text. Without --prompt, "
        f"starts a chat: {session.CHAT_HELP}. Exits with {INTERRUPTED} if Ctrl-C stopped the answer to --prompt.",
    )
    session.add_to(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this prompt and exit; - reads it from stdin")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="whether the prompt is a message of a chat, to which the chat template is applied, or the beginning of a "
        "text, which the model continues (default: a message, if the model has a chat template)",
    )
    parser.set_defaults(run=run, hint="--prompt takes a prompt")


def run(options: argparse.Namespace) -> int:
    if options.prompt is not None and options.system is None and not session.has_media(options):
        return session.answer(options, options.prompt, options.chat)
    if options.chat is False:
        raise CommandError("--no-chat: expected --prompt, and neither --system nor --image nor --audio")
    return session.answer(options, options.prompt, chat=True)
