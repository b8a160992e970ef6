"""Pictures, videos and sounds in the messages of a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .picture import MediaError, PictureError
from .sound import Sound, SoundError
from .video import Video, VideoError

# The type of a part → that of the part for a chat template.
_TYPES = {"image": "image", "image_url": "image", "input_image": "image"}
_TYPES |= {"audio": "audio", "audio_url": "audio", "input_audio": "audio", "video": "video"}
_ERRORS: dict[str, type[MediaError]] = {"image": PictureError, "audio": SoundError, "video": VideoError}
# These stand for a picture, a sound and a video in a text. Unicode reserves the code points: no text has them as
# characters.
PICTURE, SOUND, VIDEO = MARKS = "\ufdd1", "\ufdd2", "\ufdd3"
_MARKED = dict(zip(MARKS, ("image", "audio", "video")))


def with_media(
    messages: Sequence[Mapping[str, Any]],
    pictures: Sequence[Any] = (),
    sounds: Sequence[Any] = (),
    videos: Sequence[Any] = (),
) -> tuple[Sequence[Mapping[str, Any]], list[Any]]:
    """Return the messages for a chat template, and the media in their order. A sound is a `Sound`, a video a `Video`.

    A part `{"type": "image"}`, `{"type": "audio"}` or `{"type": "video"}` stands for each of them. Parts without
    content get that of `pictures`, `sounds` and `videos`. If there are no such parts, these precede the content of the
    last message of the user. Raises PictureError, SoundError or VideoError if the numbers differ.
    """
    given = {
        "image": list(pictures),
        "audio": [_medium("audio", sound) for sound in sounds],
        "video": [_medium("video", video) for video in videos],
    }
    found, placed = [], set()
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            changed.append(message)
            continue
        parts = []
        for part in content:
            if (kind := _kind(part)) is None:
                parts.append(part)
                continue
            source = _source(part)
            if source is None:
                placed.add(kind)
                if not given[kind]:
                    raise _ERRORS[kind](f"got fewer {_ERRORS[kind].things} than parts of messages for them")
                source = given[kind].pop(0)
            found.append(_medium(kind, source, part))
            parts.append({"type": kind})
        changed.append({**message, "content": parts})
    for kind in placed:
        if given[kind]:
            error = _ERRORS[kind]
            raise error(f"got {len(given[kind])} {error.things} more than parts of messages for them")
    rest = [(kind, source) for kind, sources in given.items() for source in sources]
    if rest:
        last = max((i for i, message in enumerate(changed) if message.get("role") == "user"), default=None)
        if last is None:
            error = _ERRORS[rest[0][0]]
            raise error(f"expected a message of the user for the {error.things}")
        before = sum(map(_count, changed[:last]))
        found[before:before] = [source for _, source in rest]
        content = changed[last].get("content") or ""
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        changed[last] = {**changed[last], "content": [{"type": kind} for kind, _ in rest] + texts}
    return (changed, found) if found else (messages, [])


def as_parts(message: Mapping[str, Any], always: bool = False) -> Mapping[str, Any]:
    """Return a message for a chat template, with a part for each of the MARKS in its content.

    A content without marks stays a string, unless `always`.
    """
    content = message.get("content")
    if not isinstance(content, str) or not (always or any(mark in content for mark in MARKS)):
        return message
    parts: list[dict[str, Any]] = []
    for text in re.split(f"([{''.join(MARKS)}])", content):
        if text in _MARKED:
            parts.append({"type": _MARKED[text]})
        elif text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}


def as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message for a chat template that takes only texts, with one of the MARKS for each picture and sound."""
    content = message.get("content")
    if not isinstance(content, list) or not any(_kind(part) for part in content):
        return message
    marks = dict(zip(_MARKED.values(), MARKS))
    return {**message, "content": "".join(marks.get(_kind(part)) or part.get("text", "") for part in content)}


def _count(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return sum(_kind(part) is not None for part in content) if isinstance(content, (list, tuple)) else 0


def _kind(part: Any) -> str | None:
    """Return the type for a chat template if the part is a picture or a sound, or None."""
    return _TYPES.get(part.get("type")) if isinstance(part, Mapping) and isinstance(part.get("type"), str) else None


def _medium(kind: str, source: Any, part: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return what stands for `source`, which is in a part of a message or was given for it."""
    if kind == "image" or isinstance(source, (Sound, Video)):
        return source
    return Sound(source) if kind == "audio" else Video(source, part.get("fps", Video.fps))


def _source(part: Mapping[str, Any]) -> Any:
    """Return what a part has, or None if it is only a place."""
    if isinstance(data := part.get("input_audio"), Mapping):
        return audio_url(data)
    names = ("image", "image_url", "audio", "audio_url", "video", "url")
    source = next((part[name] for name in names if part.get(name) is not None), None)
    return source.get("url") if isinstance(source, Mapping) else source


def audio_url(data: Mapping[str, Any]) -> str:
    """Return the data URL for the object `input_audio` of OpenAI's API, which has `data` in base64 and `format`."""
    return f"data:audio/{data.get('format')};base64,{data.get('data')}"
