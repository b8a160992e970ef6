"""Writes segments of a transcript as lines with times, and as subtitles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .segments import Segment


def text_lines(segments: Iterable[Segment]) -> Iterator[str]:
    return (f"[{clock(part.start)} → {clock(part.end)}] {part.text.strip()}" for part in segments)


def srt_lines(segments: Iterable[Segment]) -> Iterator[str]:
    """Yield the entries of a SubRip file, as the segments come. An empty line follows each of them."""
    for number, segment in enumerate(segments, 1):
        times = f"{clock(segment.start, ',', hours=True)} --> {clock(segment.end, ',', hours=True)}"
        yield f"{number}\n{times}\n{segment.text.strip()}\n"


def vtt_lines(segments: Iterable[Segment]) -> Iterator[str]:
    """Yield the header and the entries of a WebVTT file."""
    yield "WEBVTT\n"
    for segment in segments:
        yield f"{clock(segment.start, hours=True)} --> {clock(segment.end, hours=True)}\n{segment.text.strip()}\n"


def srt(segments: Iterable[Segment]) -> str:
    return "\n".join(srt_lines(segments))


def vtt(segments: Iterable[Segment]) -> str:
    return "\n".join(vtt_lines(segments))


def clock(seconds: float, point: str = ".", hours: bool = False) -> str:
    """Return a time as `MM:SS.mmm`, or `HH:MM:SS.mmm` with `hours` or from one hour on."""
    total = round(seconds * 1000)
    minutes, milliseconds = divmod(total, 60_000)
    whole, part = divmod(milliseconds, 1000)
    hour, minutes = divmod(minutes, 60)
    prefix = f"{hour:02}:" if hours or hour else ""
    return f"{prefix}{minutes:02}:{whole:02}{point}{part:03}"
