"""`TextStream`: whole characters, and no part of a stop string."""

import pytest
import torch
from executorch_mlx.llm.generate.text import TextStream, TokenTable


def table(*tokens: bytes) -> TokenTable:
    offsets = torch.tensor([0, *[len(token) for token in tokens]]).cumsum(0)
    return TokenTable(torch.tensor(list(b"".join(tokens)), dtype=torch.uint8), offsets)


def stream_tokens(tokens, stop=()):
    """The text that each token completes, and whether a stop string occurred."""
    stream, texts = TextStream(table(*tokens), stop), []
    for token in range(len(tokens)):
        text, found_stop = stream.feed(token)
        texts.append(text)
        if found_stop:
            return texts, True
    text, found_stop = stream.finish()
    return [*texts, text], found_stop


@pytest.mark.parametrize("text", ["plain", "naïve — 日本語", "\U0001f600 a \U0001f44d\U0001f3fd", ""])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_characters_are_whole(text, width):
    data = text.encode()
    texts, _ = stream_tokens([data[i : i + width] for i in range(0, len(data), width)] or [b""])
    assert "".join(texts) == text
    assert all("\ufffd" not in part for part in texts)


def test_incomplete_character_is_replaced_at_the_end():
    assert stream_tokens([b"a", "日".encode()[:2]]) == (["a", "", "\ufffd"], False)


@pytest.mark.parametrize(
    "tokens, stop, expected, found_stop",
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
def test_stop_strings(tokens, stop, expected, found_stop):
    assert stream_tokens(tokens, stop) == (expected, found_stop)


def test_stop_strings_are_checked():
    with pytest.raises(ValueError, match="expected non-empty strings"):
        TextStream(table(b"a"), [""])
    with pytest.raises(ValueError, match="the program has no token bytes"):
        TextStream(None, ["a"])
