"""Stop strings, and the lines that --json prints."""

import llm_programs as programs
import pytest


def play(run, tmp_path, script: bytes, *arguments):
    """Run a program that draws the bytes of `script`. The answer has at most one token for each byte."""
    path = programs.export(tmp_path / "script.pte", **programs.scripted(script + b"\0"))
    return run(path, "--prompt-ids", "0", "--max-new-tokens", len(script), *arguments)


@pytest.mark.parametrize(
    ("script", "stop", "text", "found"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["three", "two"], "one ", "two"),
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("one tw", ["two"], "one tw", None),
        ("größer 日本語", ["本"], "größer 日", "本"),
        ("größer", ["ö"], "gr", "ö"),
        ("x\n\ny", ["\n\n"], "x", "\n\n"),
        ("stop", ["stop"], "", "stop"),
    ],
    ids=str,
)
def test_stop_string_ends_the_answer(run, tmp_path, script, stop, text, found):
    flags = [f"--stop={s}" for s in stop]
    finish = "length" if found is None else "stop"
    done = play(run, tmp_path, script.encode(), *flags)
    assert done.text == text and done.finish == finish
    answer = play(run, tmp_path, script.encode(), *flags, "--json").json[-1]
    assert answer["text"] == text and answer["finish"] == finish
    assert (answer["stop_string"], answer["stop_id"]) == (found, None)


@pytest.mark.parametrize(
    ("minimum", "text"), [(0, "1 "), (2, "1 "), (3, "1 ab2 "), (5, "1 ab2 "), (7, "1 ab2 ab3"), (9, "1 ab2 ab3")]
)
def test_stop_string_begins_after_the_minimum(run, tmp_path, minimum, text):
    done = play(run, tmp_path, b"1 ab2 ab3", "--stop=ab", f"--min-new-tokens={minimum}")
    assert done.text == text and done.finish == ("length" if text.endswith("3") else "stop")


def test_stop_string_may_occur_at_the_end_of_the_answer(run, tmp_path):
    """An incomplete character becomes U+FFFD at the end, which stop strings can match."""
    done = play(run, tmp_path, b"ab\xe2\x82", "--stop=\ufffd")
    assert done.text == "ab" and done.finish == "stop"


def test_empty_stop_string_is_an_error(run, successor):
    done = run(successor, "--prompt-ids", "1", "--stop", "")
    assert done.code == 2 and "--stop: got an empty string" in done.stderr


def test_stop_string_needs_token_bytes(run, program):
    path = program("no_table", programs.successor, vocabulary=None)
    done = run(path, "--prompt-ids", "1", "--ids", "--stop", "x")
    assert done.code == 2 and "stop: the program has no token bytes, which stop strings need" in done.stderr


# -- JSON --------------------------------------------------------------------------


def test_text_is_held_back(run, tmp_path):
    """Text is held back until its characters are complete, and while it may begin a stop string. The line of the last
    token has all text that is still held back."""
    script = 'aé€😀"\\\n\x01 <en<end'.encode()
    *tokens, answer = play(run, tmp_path, script, "--json", "--stop=<end>").json
    assert [line["token"] for line in tokens] == list(script) == answer["tokens"]
    shown = ["a", "", "é", "", "", "€", "", "", "", "😀", '"', "\\", "\n", "\x01", " ", "", "", "", "<en"]
    assert [line["text"] for line in tokens] == [*shown, "", "", "<end"]
    assert answer["text"] == script.decode()


def test_answer_has_metrics(run, program):
    path = program("seeded", programs.seeded)
    *tokens, answer = run(path, "--prompt-ids", "1,2,3", "--json", "--seed=9", "--max-new-tokens=4").json
    assert [(line["sequence"], line["token"]) for line in tokens] == [(0, 9), (0, 10), (0, 11), (0, 12)]
    expected = {"sequence": 0, "tokens": [9, 10, 11, 12], "finish": "length", "seed": 9}
    expected |= {"stop_id": None, "stop_string": None, "prompt_tokens": 3, "generated_tokens": 4}
    assert answer.items() >= expected.items()
    for name in ("load_seconds", "queue_seconds", "prompt_seconds", "generation_seconds"):
        assert answer[name] > 0
    assert answer["peak_resident_bytes"] > 1 << 20
    assert answer["prompt_tokens_per_second"] == pytest.approx(3 / answer["prompt_seconds"], rel=1e-3)
    assert answer["decode_tokens_per_second"] == pytest.approx(3 / answer["generation_seconds"], rel=1e-3)


def test_stop_id_is_reported(run, successor):
    *tokens, answer = run(successor, "--prompt-ids", "10", "--json", "--stop-ids", "12").json
    assert [line["token"] for line in tokens] == answer["tokens"] == [11]
    assert (answer["finish"], answer["stop_id"], answer["stop_string"]) == ("stop", 12, None)
