"""Texts that end an answer, and the lines of --json."""

import json

import llm_programs as programs
import pytest


def play(run, tmp_path, script: bytes, *arguments):
    path = programs.export(tmp_path / "script.pte", **programs.scripted(script + b"\0"))
    return run(path, "--prompt-ids", "0", "--max-new-tokens", len(script), *arguments)


@pytest.mark.parametrize(
    ("script", "stop", "text", "finish"),
    [
        ("one two three", ["two"], "one ", "stop text"),
        ("one two three", ["three", "two"], "one ", "stop text"),
        ("aaab", ["aab"], "a", "stop text"),
        ("ababac", ["abac"], "ab", "stop text"),
        ("one tw", ["two"], "one tw", "max new tokens"),
        ("größer 日本語", ["本"], "größer 日", "stop text"),
        ("größer", ["ö"], "gr", "stop text"),
        ("x\n\ny", ["\n\n"], "x", "stop text"),
        ("stop", ["stop"], "", "stop text"),
    ],
    ids=str,
)
def test_stop_texts(run, tmp_path, script, stop, text, finish):
    done = play(run, tmp_path, script.encode(), *(f"--stop={s}" for s in stop))
    assert done.text == text and done.finish == finish


def test_a_stop_text_that_only_the_end_completes(run, tmp_path):
    """A character cut short becomes U+FFFD, and that is text as well."""
    done = play(run, tmp_path, b"ab\xe2\x82", "--stop=\ufffd")
    assert done.text == "ab" and done.finish == "stop text"


def test_an_empty_stop_text(run, successor):
    done = run(successor, "--prompt-ids", "1", "--stop", "")
    assert done.code == 2 and "--stop: an empty text" in done.stderr


def test_stop_texts_need_the_token_table(run, program):
    path = program("no_table", programs.successor, tokens=None)
    done = run(path, "--prompt-ids", "1", "--ids", "--stop", "x")
    assert done.code == 2 and "stop: the program carries no bytes of its tokens" in done.stderr


# -- JSON --------------------------------------------------------------------------


def lines(done):
    assert done.code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_text_is_held_back(run, tmp_path):
    """Until a character is whole, and while it may begin a stop text."""
    script = 'aé€😀"\\\n\x01 <en<end'.encode()
    *tokens, answer = lines(play(run, tmp_path, script, "--json", "--stop=<end>"))
    assert [line["token"] for line in tokens] == list(script) == answer["tokens"]
    shown = ["a", "", "é", "", "", "€", "", "", "", "😀", '"', "\\", "\n", "\x01", " ", "", "", "", "<en"]
    assert [line["text"] for line in tokens] == [*shown, "", "", ""]
    assert answer["text"] == script.decode()


def test_the_answer_has_its_metrics(run, program):
    path = program("seeded", programs.seeded)
    *tokens, answer = lines(run(path, "--prompt-ids", "1,2,3", "--json", "--seed=9", "--max-new-tokens=4"))
    assert len(tokens) == 4
    expected = {"row": 0, "tokens": [9, 10, 11, 12], "finish": "max new tokens", "stop_id": None, "seed": 9}
    expected |= {"prompt_tokens": 3, "decoded_tokens": 3}
    assert answer.items() >= expected.items()
    for name in ("load_seconds", "time_to_first_token", "prefill_seconds", "decode_seconds"):
        assert answer[name] > 0
    assert answer["peak_resident_bytes"] > 1 << 20
    assert answer["prefill_tokens_per_second"] == pytest.approx(3 / answer["prefill_seconds"], rel=1e-3)
    assert answer["decode_tokens_per_second"] == pytest.approx(3 / answer["decode_seconds"], rel=1e-3)


def test_a_stop_id(run, successor):
    *tokens, answer = lines(run(successor, "--prompt-ids", "10", "--json", "--stop-ids", "12"))
    assert [line["token"] for line in tokens] == answer["tokens"] == [11]
    assert answer["finish"] == "stop id" and answer["stop_id"] == 12
