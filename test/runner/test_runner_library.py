"""The library, linked by a CMake project from outside, and what it says of bad programs."""

import shutil
import subprocess
import sys
from pathlib import Path

import llm_programs as programs
import pytest
import torch
from llm_cli import BUILD

PACKAGE = BUILD / "lib" / "cmake" / "executorch_mlx"
SOURCE = Path(__file__).resolve().parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """`chat(model, seconds, *turns)`: the text of the answers, and what was said of each."""
    build = tmp_path_factory.mktemp("chat")
    # The one from PyPI: Debian's may be older than the wheels' CMake packages allow.
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    for command in (
        [cmake, "-S", SOURCE, "-B", build, f"-Dexecutorch_mlx_DIR={PACKAGE}"],
        [cmake, "--build", build],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(model: Path, seconds: float, *turns: str) -> tuple[list[bytes], list[str]]:
        command = [str(build / "chat"), str(model), str(seconds), *turns]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        said = [line for line in done.stderr.decode().splitlines() if "in the cache" in line]
        return done.stdout.split(b"\n")[:-1], said

    return start


def summed_answer(context: list[int], end: int, capacity: int) -> list[int]:
    """What `programs.summed` goes on with; `context` grows by what is in the cache."""
    answer = []
    while True:
        token = sum((i + 1) * t for i, t in enumerate(context)) % 256
        if token == end:
            return answer
        answer.append(token)
        if len(context) == capacity:
            return answer
        context.append(token)


def test_the_example_keeps_the_conversation(chat, program):
    """A turn goes on where the last one ended, with the token that ended it."""
    letters = [bytes([65 + i % 26]) for i in range(256)]
    state = programs.summed_state(32)
    options = {"tokens": letters, "max_context_len": 32, "get_eos_ids": [20]}
    path = program("summed_text", programs.summed, state=state, **options)
    first = [3, 1]
    answers = [summed_answer(first, 20, 32)]
    second = [*first, 20, 2, 5]
    answers.append(summed_answer(second, 20, 32))
    texts, said = chat(path, 60, "3,1", "2,5")
    assert texts == [b"".join(letters[t] for t in answer) for answer in answers]
    assert said[0].startswith("stop id") and said[0].endswith(f" {len(first)} tokens in the cache")
    assert said[1].endswith(f" {len(second)} tokens in the cache")


def test_the_example_takes_a_turn_back(chat, program, tmp_path):
    state = programs.summed_state(64)
    options = {"tokens": [bytes([65 + i % 26]) for i in range(256)], "get_eos_ids": [20]}
    path = program("summed_long", programs.summed, state=state, max_context_len=64, **options)
    want = chat(path, 60, "3,1", "7,7,9")
    texts, said = chat(path, 60, "3,1", "2,5", "^7,7,9")
    assert [texts[0], texts[2]] == want[0]
    assert said[2].split(", ")[2] == want[1][1].split(", ")[2]
    # A program that cannot go back that far: its caches slide.
    short = tmp_path / "short.pte"
    programs.export(short, programs.summed, state=state, max_context_len=64, get_max_rewind=2, **options)
    with pytest.raises(AssertionError, match="rewind: position 3, expected 0 or 62 to 64"):
        chat(short, 60, "3,1", "2,5", "^7,7,9")


def test_the_example_cancels_from_another_thread(chat, program):
    path = program("endless_text", programs.successor, max_context_len=10**12)
    _, said = chat(path, 0.05, "1", "2")
    assert [line.partition(",")[0] for line in said] == ["cancelled", "cancelled"]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"sampling_head": False}, "forward has 7 inputs, expected 2 by its sampling_* methods"),
        ({"sampling_head": 1}, "sampling_head is not one bool"),
        ({"get_vocab_size": None}, "no method get_vocab_size"),
        ({"get_vocab_size": "256"}, "get_vocab_size is not one integer"),
        ({"get_vocab_size": 0}, "get_vocab_size is 0"),
        ({"get_max_seq_len": 17}, "get_max_seq_len is 17, expected 1 to get_max_context_len = 16"),
        ({"get_max_seq_len": 9}, "input 0 (tokens) is of size 8 on axis 1, expected 9"),
        ({"get_max_batch_size": 2}, "forward has 7 inputs, expected 8 by its sampling_* methods"),
        ({"get_max_batch_size": 0}, "get_max_batch_size is 0"),
        ({"sampling_penalties": True}, "forward has 7 inputs, expected 10 by its sampling_* methods"),
        ({"sampling_logit_bias": -1}, "sampling_logit_bias is -1"),
        ({"sampling_seed": False}, "forward has 7 inputs, expected 6 by its sampling_* methods"),
        ({"sampling_seed": 1}, "sampling_seed is not one bool"),
        ({"get_eos_ids": [1, 2.5]}, "get_eos_ids is neither integers nor a tensor of them"),
        ({"token_offsets": torch.arange(9)}, "token_offsets has 9 entries, expected"),
        ({"token_offsets": torch.arange(257) * 2}, "token_offsets do not rise from 0 to the 256"),
        ({"token_bytes": torch.zeros(256)}, "token_bytes is Float of rank 1, expected Byte of rank 1"),
    ],
    ids=lambda value: repr(next(iter(value.items())))[:40] if isinstance(value, dict) else "",
)
def test_programs_that_break_the_contract(run, tmp_path, metadata, message):
    path = programs.export(tmp_path / "model.pte", programs.successor, **metadata)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert done.stdout == ""
    assert message in done.stderr


def test_eos_ids_as_a_tensor(run, tmp_path):
    path = programs.export(
        tmp_path / "model.pte", programs.successor, get_eos_ids=torch.tensor([4, 9])
    )
    assert run(path, "--prompt-ids", "1", "--ids").ids == [2, 3]


def test_wrong_dtype_of_an_input(run, tmp_path, monkeypatch):
    monkeypatch.setitem(programs.OPTIONAL, "top_k", torch.tensor(0.0))
    path = programs.export(tmp_path / "model.pte", programs.successor)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert "forward: input 5 (top_k) is Float of rank 0, expected Long of rank 0" in done.stderr


def test_output_that_is_no_token(run, tmp_path):
    def logits(self, tokens, input_pos, **_):
        return tokens[:, -1].to(torch.float32)

    done = run(programs.export(tmp_path / "model.pte", logits), "--prompt-ids", "1")
    assert done.code == 1
    assert "forward does not return a token, Long [1]" in done.stderr


def test_token_outside_the_vocabulary(run, tmp_path):
    def next_up(self, tokens, input_pos, **_):
        return tokens[:, -1] + 1

    path = programs.export(tmp_path / "model.pte", next_up)
    done = run(path, "--prompt-ids", "254", "--ids")
    assert done.code == 1
    assert done.stdout == "255\n"
    assert "forward: returned token 256, outside the vocabulary [0, 256)" in done.stderr


def test_no_forward(run, tmp_path):
    from executorch.exir import to_edge

    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2),))
    path = tmp_path / "model.pte"
    path.write_bytes(to_edge({"encode": program}).to_executorch().buffer)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert "no method forward; it has encode" in done.stderr


@pytest.mark.parametrize("keep", [8, 100, 0.5, 0.99])
def test_a_damaged_file(run, successor, tmp_path, keep):
    data = successor.read_bytes()
    path = tmp_path / "cut.pte"
    path.write_bytes(data[: keep if keep >= 1 else int(len(data) * keep)])
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert "not an ExecuTorch program" in done.stderr
