"""`/v1/audio/transcriptions` and `/v1/audio/translations`: transcripts by speech models."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.errors import FieldError
from ..llm.speech import read_audio
from ..llm.speech.subtitles import srt, vtt
from .errors import answer_error, argument_error, field_error
from .streaming import ServerSentEvents
from .uploads import Form

if TYPE_CHECKING:
    import numpy

    from ..llm.speech import Segment, SpeechModel

FIELDS = {"file", "model", "language", "prompt", "response_format", "temperature", "timestamp_granularities", "stream"}
GRANULARITIES = ("segment", "word")
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


@dataclass(frozen=True)
class SpeechRequest:
    """The fields of a request, besides the file. `task`: `transcribe` or `translate`."""

    task: str
    format: str
    granularities: frozenset[str]
    is_streamed: bool
    language: str | None
    prompt: str | None
    temperature: float

    @classmethod
    def of(cls, form: Form, task: str) -> SpeechRequest:
        """Read and check the fields of a form. Raises ApiError."""
        format = form.text("response_format") or "json"
        _check("response_format", format, FORMATS)
        granularities = frozenset(form.texts("timestamp_granularities"))
        for name in granularities:
            _check("timestamp_granularities", name, GRANULARITIES)
        if granularities and format != "verbose_json":
            problem = f"got it with the response_format {format}, expected verbose_json"
            raise field_error("timestamp_granularities", problem)
        stream = form.text("stream").lower() or "false"
        _check("stream", stream, ("true", "false"))
        if stream == "true" and format not in ("json", "text"):
            raise field_error("stream", f"got it with the response_format {format}, expected json or text")
        return cls(
            task,
            format,
            granularities or frozenset({"segment"}),
            stream == "true",
            form.text("language") or None,
            form.text("prompt") or None,
            _number(form, "temperature"),
        )

    def segments(self, speech: SpeechModel, samples: numpy.ndarray) -> Iterator[Segment]:
        """Yield the segments of a sound. Raises ApiError."""
        words = "word" in self.granularities
        try:
            yield from speech.transcribe(
                samples,
                language=self.language,
                task=self.task,
                prompt=self.prompt,
                words=words,
                temperature=self.temperature,
            )
        except FieldError as error:
            raise argument_error(error, {"words": "timestamp_granularities", "sound": "file"}) from error
        except RuntimeError as error:
            raise answer_error(error) from error


def _check(name: str, value: str, expected: Sequence[str]) -> None:
    if value not in expected:
        raise field_error(name, f"got {value[:40]!r}, expected {', '.join(expected)}")


def _number(form: Form, name: str) -> float:
    text = form.text(name) or "0"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise field_error(name, f"got {text[:40]!r}, expected a number from 0 to 2")
    return value


def samples_of(model: ServedSpeech, form: Form) -> numpy.ndarray:
    """Return the samples of the file in a form. Raises ApiError."""
    file = form.file("file")
    with tempfile.NamedTemporaryFile(suffix=Path(file.filename).suffix[:16]) as sound:
        sound.write(file.data)
        sound.flush()
        try:
            return read_audio(sound.name, model.speech.sample_rate)
        except ValueError as error:
            raise field_error("file", str(error).removeprefix(f"read_audio: {sound.name}: ")) from error


def transcript(model: ServedSpeech, form: Form, request: SpeechRequest) -> tuple[str | dict[str, Any], str]:
    """Return the response with a whole transcript, and its media type. Raises ApiError."""
    samples = samples_of(model, form)
    segments = list(request.segments(model.speech, samples))
    text = "".join(segment.text for segment in segments).strip()
    subtitles: dict[str, Callable] = {"srt": srt, "vtt": vtt}
    if request.format in subtitles:
        return subtitles[request.format](segments), "text/plain; charset=utf-8"
    if request.format == "text":
        return text + "\n", "text/plain; charset=utf-8"
    body: dict[str, Any] = {"text": text}
    if request.format == "verbose_json":
        language = segments[0].language if segments else request.language
        body |= {"task": request.task, "language": language, "duration": len(samples) / model.speech.sample_rate}
        if "word" in request.granularities:
            words = [word for segment in segments for word in segment.words]
            body["words"] = [{"word": word.text.strip(), "start": word.start, "end": word.end} for word in words]
        if "segment" in request.granularities:
            body["segments"] = [
                {"id": place, "start": part.start, "end": part.end, "text": part.text, "tokens": [*part.tokens]}
                for place, part in enumerate(segments)
            ]
    return body, "application/json"


async def transcript_events(
    model: ServedSpeech, form: Form, request: SpeechRequest, on_end: Callable[[], object]
) -> AsyncIterator[str]:
    """Return the events of a streamed transcript: a delta for each segment, and at the end the whole text.

    Raises ApiError for an error before the first segment. A later one becomes the last event. If the client leaves, the
    work ends with the current segment. `on_end` is called at the end, on another thread.
    """
    loop, queue, has_left = asyncio.get_running_loop(), asyncio.Queue[Any](), threading.Event()

    def put(item: Any) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def work() -> None:
        try:
            for segment in request.segments(model.speech, samples_of(model, form)):
                if has_left.is_set():
                    break
                put(segment.text)
            put(None)
        except Exception as error:  # noqa: BLE001  (raised again by the reader of the queue)
            put(error)
        finally:
            on_end()

    working = loop.run_in_executor(None, work)
    try:
        first = await queue.get()
    except BaseException:  # the client has left
        has_left.set()
        raise
    if isinstance(first, Exception):
        raise answer_error(first) from first

    async def events() -> AsyncIterator[str]:
        item, text = first, ""
        try:
            while isinstance(item, str):
                piece = item if text else item.lstrip()
                text += piece
                yield ServerSentEvents.line({"type": "transcript.text.delta", "delta": piece})
                item = await queue.get()
            if item is None:
                yield ServerSentEvents.line({"type": "transcript.text.done", "text": text.rstrip()})
            else:
                yield ServerSentEvents.line(answer_error(item).openai_body)
            await working
        finally:
            has_left.set()

    return events()
