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
SOURCE = Path(__file__).with_name("consumer")


@pytest.fixture(scope="session")
def consumer(tmp_path_factory):
    """`consumer(model, command)`: the lines it prints."""
    build = tmp_path_factory.mktemp("consumer")
    # The one from PyPI: Debian's may be older than the wheels' CMake packages allow.
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or "cmake"
    for command in (
        [cmake, "-S", SOURCE, "-B", build, f"-Dexecutorch_mlx_DIR={PACKAGE}"],
        [cmake, "--build", build],
    ):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(model: Path, command: str) -> list[str]:
        done = subprocess.run(
            [str(build / "consumer"), str(model), command], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return start


def test_text_is_held_back(consumer, tmp_path):
    script = "aé€😀".encode()
    path = programs.export(tmp_path / "script.pte", **programs.scripted(script))
    shown = [line.split("'")[1] for line in consumer(path, "stream") if line.startswith("token")]
    assert shown == [
        "61",
        *("", "é".encode().hex()),
        *("", "", "€".encode().hex()),
        *("", "", "", "😀".encode().hex()),
    ]


def test_callback_ends_the_answer(consumer, successor):
    assert consumer(successor, "stop_in_callback") == ["end cancelled, 3 tokens, position 3"]


def test_cancel_from_another_thread(consumer, program):
    path = program("endless", programs.successor, max_context_len=10**12)
    assert consumer(path, "cancel") == [
        "end cancelled",
        "end cancelled",
        "end max new tokens, 2 tokens, position 2",
    ]


def test_turns_keep_the_context(consumer, program):
    """A turn goes on where the last one ended; prefill and step are generate by hand."""
    path = program(
        "summed",
        programs.summed,
        state=programs.summed_state(32),
        max_seq_len=8,
        max_context_len=32,
    )

    def following(context: list[int]) -> int:
        return sum((i + 1) * token for i, token in enumerate(context)) % 256

    first = following([3, 1])
    second = following([3, 1, first])
    third = following([3, 1, first, 2, 5, 4])
    fourth = following([3, 1, first, 2, 5, 4, third])
    assert consumer(path, "turns") == [
        *(f"drew {first}", f"drew {second}", "position 3"),
        *(f"drew {third}", f"drew {fourth}", "position 7"),
        *(f"prefill {first}", f"step {second}", "position 3"),
    ]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"sampling_head": False}, "samples no token inside (sampling_head is false)"),
        ({"sampling_head": None}, "samples no token inside (no method sampling_head)"),
        ({"get_vocab_size": None}, "no method get_vocab_size"),
        ({"get_vocab_size": "256"}, "get_vocab_size is not one integer"),
        ({"get_vocab_size": 0}, "get_vocab_size is 0"),
        ({"get_max_seq_len": 17}, "get_max_seq_len is 17, expected 1 to get_max_context_len = 16"),
        (
            {"get_max_seq_len": 9},
            "forward: tokens is at most [1, 8], expected [1, get_max_seq_len = 9]",
        ),
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
