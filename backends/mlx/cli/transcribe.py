"""`executorch-mlx transcribe`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.export_options import SPEECH
from . import model_arguments, sampling_arguments
from .errors import CommandError

if TYPE_CHECKING:
    from ..llm.speech import Segment

_SETTINGS = {"temperature": float, "top_p": float, "top_k": int, "seed": int, "max_new_tokens": int}

_OPTIONS = ("language", "task", "timestamps", "prompt", "voice_activity", "words", "no_speech_threshold")


def add_to(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "transcribe",
        help="transcribe a sound file with a speech model",
        description="Transcribe a sound file (WAV, FLAC, MP3 and more) of any length with a speech model. The segments "
        "stream to stdout.",
    )
    add = parser.add_argument
    model_arguments.add_model(parser)
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
    add("--prompt", metavar="TEXT", help="text that was said before: names, the spelling of words, or a style")
    add("--voice-activity", action="store_true", help="leave out parts that are quiet for longer than a second")
    add("--words", action="store_true", help="with --format json, give the words of each segment with their times")
    add(
        "--no-speech-threshold",
        type=float,
        metavar="P",
        default=0.6,
        help="a window has no text if the model takes it for one without speech, with a higher probability than P "
        "(default: %(default)s; 1: never)",
    )
    model_arguments.add_device(parser)
    model_arguments.add_export_options(parser)
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
    sampling_arguments.check(settings)
    model_path = model_arguments.find_model(options.model, options, SPEECH).path
    try:
        with SpeechModel(model_path, device=options.device) as model:
            segments = model.transcribe(
                options.sound, **{name: getattr(options, name) for name in _OPTIONS}, **settings
            )
            for entry in writers[options.format](segments):
                print(entry, flush=True)
    except (ValueError, RuntimeError) as error:
        raise CommandError(error) from error
    return 0
