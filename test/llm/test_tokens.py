"""The token table gives back the bytes of any text."""

from pathlib import Path

import pytest
from executorch_mlx.llm.tokens import _sentencepiece, token_table
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


@pytest.mark.parametrize(
    "text", ["Return the value.", "  tabs\tand\nlines", "naïve — 日本語 \U0001f600", "\x00\x7f"]
)
def test_table_spells_the_text(text):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    data, ends = token_table(tokenizer, len(tokenizer))
    ids = tokenizer(text)["input_ids"]
    spelled = b"".join(data[ends[i] : ends[i + 1]].numpy().tobytes() for i in ids)
    assert spelled == text.encode()


def test_special_tokens_and_missing_ids_have_no_bytes():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    _, ends = token_table(tokenizer, len(tokenizer) + 10)
    assert len(ends) == len(tokenizer) + 11
    assert ends[tokenizer.bos_token_id] == ends[tokenizer.bos_token_id + 1]
    assert ends[-11] == ends[-1]


def test_sentencepiece_pieces():
    assert _sentencepiece("\u2581the") == b" the"
    assert _sentencepiece("<0x0A>") == b"\n"
