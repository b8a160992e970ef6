"""Pictures in the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .picture import PictureError

_PART = {"type": "image"}
# Stands for a picture in a text. Unicode reserves this code point: it is never a character of a text.
PICTURE = "\ufdd1"


def with_pictures(
    messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any] = ()
) -> tuple[Sequence[Mapping[str, Any]], list[Any]]:
    """Return the messages for a chat template, in which a part `{"type": "image"}` stands for each picture, and these.

    Parts without a picture get those of `pictures`. If there are no such parts, these precede the content of the last
    message of the user. Raises PictureError if the numbers differ.
    """
    given, found, is_placed = list(pictures), [], False
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            changed.append(message)
            continue
        parts = []
        for part in content:
            if not _is_picture(part):
                parts.append(part)
                continue
            source = _source(part)
            if source is None:
                is_placed = True
                if not given:
                    raise PictureError("got fewer pictures than parts of messages for them")
                source = given.pop(0)
            found.append(source)
            parts.append(_PART)
        changed.append({**message, "content": parts})
    if given and is_placed:
        raise PictureError(f"got {len(given)} pictures more than parts of messages for them")
    if given:
        last = max((i for i, message in enumerate(changed) if message.get("role") == "user"), default=None)
        if last is None:
            raise PictureError("expected a message of the user for the pictures")
        before = sum(map(_count, changed[:last]))
        found[before:before] = given
        content = changed[last].get("content") or ""
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        changed[last] = {**changed[last], "content": [_PART] * len(given) + texts}
    return (changed, found) if found else (messages, [])


def as_parts(message: Mapping[str, Any], always: bool = False) -> Mapping[str, Any]:
    """Return a message for a chat template, with a part for each mark PICTURE in its content.

    A content without marks stays a string, unless `always`.
    """
    content = message.get("content")
    if not isinstance(content, str) or not (always or PICTURE in content):
        return message
    parts: list[dict[str, Any]] = []
    for index, text in enumerate(content.split(PICTURE)):
        parts += [_PART] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def _count(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return sum(map(_is_picture, content)) if isinstance(content, (list, tuple)) else 0


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "input_image")


def _source(part: Mapping[str, Any]) -> Any:
    """Return the picture of a part, or None if the part is only its place."""
    source = part.get("image") or part.get("image_url") or part.get("url")
    return source.get("url") if isinstance(source, Mapping) else source
