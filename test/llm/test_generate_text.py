"""Text as it comes: whole characters, and nothing of a stop string."""

import pytest
import torch
from executorch_mlx.llm.text import TextStream, TokenTable


def table(*pieces: bytes) -> TokenTable:
    ends = torch.tensor([0, *[len(p) for p in pieces]]).cumsum(0)
    return TokenTable(torch.tensor(list(b"".join(pieces)), dtype=torch.uint8), ends)


def streamed(pieces, stop=()):
    """The pieces of text that come out, and whether a stop string ended them."""
    stream, out = TextStream(table(*pieces), stop), []
    for token in range(len(pieces)):
        text, stopped = stream.feed(token)
        out.append(text)
        if stopped:
            return out, True
    text, stopped = stream.finish()
    return [*out, text], stopped


@pytest.mark.parametrize("text", ["plain", "naïve — 日本語", "\U0001f600 a \U0001f44d\U0001f3fd", ""])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_characters_are_whole(text, width):
    data = text.encode()
    pieces = [data[i : i + width] for i in range(0, len(data), width)] or [b""]
    out, _ = streamed(pieces)
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out)


def test_a_character_that_stays_incomplete_is_replaced_at_the_end():
    assert streamed([b"a", "日".encode()[:2]]) == (["a", "", "\ufffd"], False)


@pytest.mark.parametrize(
    "pieces, stop, expected, stopped",
    [
        ([b"one ", b"STOP", b" two"], ["STOP"], ["one ", ""], True),
        ([b"one S", b"TO", b"P two"], ["STOP"], ["one ", "", ""], True),
        ([b"one S", b"TO", b"AST"], ["STOP"], ["one ", "", "STOA", "ST"], False),
        ([b"one ST"], ["STOP"], ["one ", "ST"], False),
        ([b"aab"], ["ab"], ["a"], True),
        ([b"xy", b"z"], ["yz", "z"], ["x", ""], True),
        ([b"b and a"], ["a", "b"], [""], True),
        (["日".encode()[:1], "日".encode()[1:], b"!"], ["日"], ["", ""], True),
        ([b"\n", b"\n", b"x"], ["\n\n"], ["", ""], True),
    ],
)
def test_stop_strings(pieces, stop, expected, stopped):
    assert streamed(pieces, stop) == (expected, stopped)


def test_stop_strings_are_checked():
    with pytest.raises(ValueError, match="expected strings that are not empty"):
        TextStream(table(b"a"), [""])
    with pytest.raises(ValueError, match="no text to stop at"):
        TextStream(None, ["a"])
