"""The text of an answer: incomplete and invalid UTF-8."""

import random

import llm_programs as programs
import pytest

# Overlong forms, surrogates, code points beyond U+10FFFF, incomplete characters, stray continuation bytes.
INVALID = [
    b"\x80",
    b"\xbf\xbf",
    b"\xc0\xaf",
    b"\xc1",
    b"\xe0\x80\xaf",
    b"\xed\xa0\x80",
    b"\xf0\x80\x80\x80",
    b"\xf4\x90\x80\x80",
    b"\xf5",
    b"\xff",
    b"\xe2\x82",
    b"\xf0\x9f\x98",
    b"\xc3",
    b"\xe2\x28\xa1",
    b"\xf0\x9f\x41",
    b"\xe2\xe2\x82\xac",
]


def _play(run, tmp_path, script: bytes) -> str:
    path = programs.export(tmp_path / "script.pte", **programs.scripted(script))
    return run(path, "--prompt-ids", "0", "--max-new-tokens", len(script)).text


@pytest.mark.parametrize("invalid", INVALID, ids=bytes.hex)
def test_invalid_bytes_are_replaced_as_in_python(run, tmp_path, invalid):
    script = b"a" + invalid + "é".encode() + invalid
    assert _play(run, tmp_path, script) == script.decode(errors="replace")


def test_random_bytes_are_decoded_as_in_python(run, tmp_path):
    """2,000 bytes, mostly from the boundaries of the valid ranges."""
    source = random.Random(7)
    boundaries = [0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1, 0xEC]
    boundaries += [0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    script = bytes(source.choice(boundaries) if source.random() < 0.8 else source.randrange(256) for _ in range(2000))
    assert _play(run, tmp_path, script) == script.decode(errors="replace")


def test_valid_text_is_unchanged(run, tmp_path):
    text = "naïve – 日本語 😀🏳️‍🌈 end"
    assert _play(run, tmp_path, text.encode()) == text


def test_incomplete_character_before_a_stop_id_is_replaced(run, tmp_path):
    path = programs.export(tmp_path / "cut.pte", **programs.scripted(b"ab\xe2\x82\x00"))
    assert run(path, "--prompt-ids", "0", "--stop-ids", "0").text == "ab\ufffd"


def test_tokens_may_have_no_bytes_or_end_within_a_character(run, program):
    table = [b"", "日".encode()[:1], "日".encode()[1:] + b" x", b"", b"tail"]
    path = program("token_table", programs.successor, vocabulary=table, vocab_size=5)
    assert run(path, "--prompt-ids", "0", "--max-new-tokens", "4").text == "日 xtail"
