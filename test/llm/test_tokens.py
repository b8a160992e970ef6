"""The table of token bytes."""

from pathlib import Path

import pytest
from executorch_mlx.llm.tokens import _sentencepiece, token_table
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


@pytest.mark.parametrize(
    "text", ["Return the value.", "  tabs\tand\nlines", "naïve — 日本語 \U0001f600", "\x00\x7f"]
)
def test_the_bytes_of_the_tokens_are_those_of_the_text(text):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    data, offsets = token_table(tokenizer, len(tokenizer))
    ids = tokenizer(text)["input_ids"]
    concatenated = b"".join(data[offsets[i] : offsets[i + 1]].numpy().tobytes() for i in ids)
    assert concatenated == text.encode()


def test_special_tokens_and_missing_ids_have_no_bytes():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    _, offsets = token_table(tokenizer, len(tokenizer) + 10)
    assert len(offsets) == len(tokenizer) + 11
    assert offsets[tokenizer.bos_token_id] == offsets[tokenizer.bos_token_id + 1]
    assert offsets[-11] == offsets[-1]


def test_added_tokens_are_decoded_as_by_the_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = ["\n Caf\u00e9", "<d\u00e9j\u00e0 vu>", "\u65e5\u672c\u00e9", "<tool>"]
    tokenizer.add_tokens(texts)
    data, offsets = token_table(tokenizer, len(tokenizer))
    for token, text in enumerate(texts, len(tokenizer) - len(texts)):
        assert data[offsets[token] : offsets[token + 1]].numpy().tobytes() == text.encode()
        assert tokenizer.decode([token]) == text


def test_sentencepiece_pieces():
    assert _sentencepiece("\u2581the") == b" the"
    assert _sentencepiece("<0x0A>") == b"\n"
