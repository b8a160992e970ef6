"""`executorch-mlx run`"""

from __future__ import annotations

import argparse

from . import session
from .errors import INTERRUPTED, CommandError


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "run",
        help="generate text with a language model",
        description="Generate text with a language model. The answer streams to stdout, metrics go to stderr. Without "
        f"--prompt, starts a chat: {session.CHAT_HELP}. Exits with {INTERRUPTED} if Ctrl-C stopped the answer to "
        "--prompt.",
    )
    session.add_to(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="answer this prompt and exit; - reads it from stdin")
    parser.add_argument(
        "--chat", action="store_true", help="treat the prompt as a chat message: apply the chat template"
    )
    parser.set_defaults(run=run, hint="--prompt takes a prompt")


def run(options: argparse.Namespace) -> int:
    chat = options.chat or options.prompt is None or bool(options.image)
    if options.system is not None and not chat:
        raise CommandError("--system: expected --chat as well")
    return session.answer(options, options.prompt, chat)
