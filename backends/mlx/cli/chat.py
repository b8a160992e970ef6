"""`executorch-mlx chat`"""

from __future__ import annotations

import argparse

from . import session


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "chat",
        help="chat with a language model in the terminal",
        description=f"Chat with a language model: each line is a message. {session.CHAT_HELP}.",
    )
    session.add_to(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    return session.answer(options, None, chat=True)
