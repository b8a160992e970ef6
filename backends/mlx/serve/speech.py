"""`/v1/audio/transcriptions`: transcripts by speech models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.speech.subtitles import srt, vtt
from .errors import ApiError, answer_error
from .uploads import Form

if TYPE_CHECKING:
    from ..llm.speech import Segment, SpeechModel

FIELDS = {"file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities", "stream"}
FORMATS = ("json", "text", "srt", "vtt", "verbose_json")


class ServedSpeech:
    """A speech model with the name that it has in the API."""

    def __init__(self, speech: SpeechModel, name: str):
        self.speech, self.name, self.base = speech, name, name

    def close(self) -> None:
        self.speech.close()

    def description(self) -> dict[str, Any]:
        """Return the fields of the model's object in `/v1/models` that are known once it is loaded."""
        return {"task": "transcription", "languages": [*self.speech.languages], "has_chat_template": False}


def transcribe(model: ServedSpeech, form: Form, task: str) -> tuple[str | dict[str, Any], str]:
    """Return the response to a request, and its media type. Raises ApiError.

    `task`: `transcribe` or `translate`.
    """
    format = form.text("response_format", "json")
    if format not in FORMATS:
        message = f"response_format: got {format[:40]!r}, expected {', '.join(FORMATS)}"
        raise ApiError(message, param="response_format")
    for name, wanted in (
        ("prompt", ("",)),
        ("stream", ("", "false", "False")),
        ("timestamp_granularities", ("segment",)),
    ):
        if any(text not in wanted for text in form.texts(name)):
            raise ApiError(f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    temperature = _number(form, "temperature")
    with tempfile.NamedTemporaryFile(suffix=Path(form.file("file").filename).suffix[:16]) as sound:
        sound.write(form.file("file").data)
        sound.flush()
        try:
            language = form.text("language") or None
            segments = list(model.speech.transcribe(sound.name, language=language, task=task, temperature=temperature))
        except ValueError as error:
            raise ApiError(str(error).replace(sound.name, "file")) from error
        except RuntimeError as error:
            raise answer_error(error) from error
    return _response(segments, format, task)


def _number(form: Form, name: str) -> float:
    text = form.text(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise ApiError(f"{name}: got {text[:40]!r}, expected a number from 0 to 2", param=name)
    return value


def _response(segments: Sequence[Segment], format: str, task: str) -> tuple[str | dict[str, Any], str]:
    text = "".join(segment.text for segment in segments).strip()
    subtitles: dict[str, Callable] = {"srt": srt, "vtt": vtt}
    if format in subtitles:
        return subtitles[format](segments), "text/plain; charset=utf-8"
    if format == "text":
        return text + "\n", "text/plain; charset=utf-8"
    body: dict[str, Any] = {"text": text}
    if format == "verbose_json":
        fields = [
            {"id": place, "start": part.start, "end": part.end, "text": part.text, "tokens": [*part.tokens]}
            for place, part in enumerate(segments)
        ]
        language = segments[0].language if segments else None
        end = segments[-1].end if segments else 0.0
        body |= {"task": task, "language": language, "duration": end, "segments": fields}
    return body, "application/json"
