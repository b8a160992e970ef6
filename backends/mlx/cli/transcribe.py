"""`executorch-mlx transcribe`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .model_arguments import CommandError

if TYPE_CHECKING:
    from ..llm.speech import Segment

_SETTINGS = {"temperature": float, "top_p": float, "top_k": int, "seed": int, "max_new_tokens": int}


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "transcribe",
        help="transcribe a sound file with a speech model",
        description="Transcribe a sound file (WAV, FLAC, MP3 and more) of any length with a speech model. The segments "
        "stream to stdout.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL.pte", type=Path, help="speech model made by executorch-mlx export")
    add("sound", metavar="FILE", type=Path, help="sound file")
    add(
        "--language",
        metavar="L",
        help="the spoken language, as a code such as de or an English name (default: detected)",
    )
    add(
        "--task",
        choices=("transcribe", "translate"),
        default="transcribe",
        help="translate: translate to English (default: %(default)s)",
    )
    add(
        "--format",
        choices=("text", "plain", "json", "srt", "vtt"),
        default="text",
        help="text: lines with times; plain: lines without times; json: one object per segment; srt, vtt: subtitles "
        "(default: %(default)s)",
    )
    add(
        "--no-timestamps",
        dest="timestamps",
        action="store_false",
        help="do not let the model write timestamps: a segment is a window",
    )
    add("--device", choices=("cpu", "gpu"), help="device to run on (default: the GPU if there is one)")
    for name, type_ in _SETTINGS.items():
        add(
            f"--{name.replace('_', '-')}",
            type=type_,
            metavar="N" if type_ is int else "X",
            default=argparse.SUPPRESS,
            help="largest number of tokens in a window" if name == "max_new_tokens" else f"{name} of the sampling",
        )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from ..llm.speech import SpeechModel, subtitles

    settings: dict[str, Any] = {name: getattr(options, name) for name in _SETTINGS if name in options}
    writers: dict[str, Callable[[Iterable[Segment]], Iterable[str]]] = {
        "text": subtitles.text_lines,
        "plain": lambda segments: (segment.text.strip() for segment in segments),
        "json": lambda segments: (json.dumps(asdict(segment), ensure_ascii=False) for segment in segments),
        "srt": subtitles.srt_lines,
        "vtt": subtitles.vtt_lines,
    }
    try:
        with SpeechModel(options.model, device=options.device) as model:
            segments = model.transcribe(
                options.sound, language=options.language, task=options.task, timestamps=options.timestamps, **settings
            )
            for entry in writers[options.format](segments):
                print(entry, flush=True)
    except (ValueError, RuntimeError) as error:
        raise CommandError(error) from error
    return 0
