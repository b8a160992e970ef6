"""The engine library: it builds into other CMake projects, and refuses invalid programs with an error."""

import shutil
import subprocess
from pathlib import Path

import c_api as api
import engine_rows
import llm_programs as programs
import pytest
import torch
from cpp_programs import build_project
from executorch.exir import to_edge_transform_and_lower
from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary
from executorch_mlx import MLXPartitioner
from fuzz_payloads import peak_gigabytes

SOURCES = Path(__file__).resolve().parents[2] / "backends" / "mlx"
C_HEADERS = {"engine": ("executorch_mlx", "program"), "runtime": ("delegate", "memory", "buffers", "deferred")}
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STRESS = Path(__file__).resolve().parent / "stress"


@pytest.mark.parametrize("language", ["c", "c++"])
def test_headers_of_the_c_api_are_valid(language, tmp_path):
    """test/packaging/test_xcframework.py imports them as a module in Objective-C."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler")
    standard = "c++11" if language == "c++" else "c11"
    includes = [f"-I{SOURCES / part / 'include'}" for part in C_HEADERS]
    options = ["-x", language, f"-std={standard}", "-Wall", "-Werror", "-fsyntax-only", *includes]
    for name in sum(C_HEADERS.values(), ()):  # each by itself
        source = tmp_path / f"{name}.source"
        source.write_text(f"#include <executorch_mlx/{name}.h>\n")
        strict = ["-Wstrict-prototypes"] if standard == "c11" else []
        done = subprocess.run([compiler, *options, *strict, source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """`chat(model, seconds, *turns)` runs the program of examples/cpp, which cancels an answer after `seconds`.

    It returns the text of each answer, and the line that the program prints on stderr for the answer.
    """
    build = build_project(EXAMPLES / "cpp", tmp_path_factory.mktemp("chat"))

    def start(model: Path, seconds: float, *turns: str) -> tuple[list[bytes], list[str]]:
        command = [str(build / "chat"), str(model), str(seconds), *turns]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        reports = [line for line in done.stderr.decode().splitlines() if line.endswith("reused")]
        return done.stdout.split(b"\n")[:-1], reports

    return start


def summed_answer(context: list[int], end: int, capacity: int) -> list[int]:
    """Return the answer of `programs.summed` before the token `end`. Appends drawn tokens, and `end`, to `context`."""
    answer = []
    while True:
        token = sum((i + 1) * t for i, t in enumerate(context)) % 256
        is_full = len(context) == capacity
        context.append(token)
        if token == end:
            return answer
        answer.append(token)
        if is_full:
            return answer


LETTERS = [bytes([65 + i % 26]) for i in range(256)]


def test_example_keeps_the_conversation(chat, program):
    options = {"vocabulary": LETTERS, "max_context_len": 32, "get_eos_ids": [20]}
    path = program("summed_text", programs.summed, state=programs.summed_state(32), **options)
    context = [3, 1]
    answers = [summed_answer(context, 20, 32)]
    length = len(context)
    context += [2, 5]
    answers.append(summed_answer(context, 20, 32))
    texts, reports = chat(path, 60, "3,1", "2,5")
    assert texts == [b"".join(LETTERS[t] for t in answer) for answer in answers]
    assert reports[0].startswith("stop, ") and reports[0].endswith(" 0 tokens reused")
    assert reports[1].endswith(f" {length - 1} tokens reused")


def test_example_replaces_a_turn(chat, program, tmp_path):
    state = programs.summed_state(64)
    options = {"vocabulary": LETTERS, "get_eos_ids": [20]}
    path = program("summed_long", programs.summed, state=state, max_context_len=64, **options)
    expected = chat(path, 60, "3,1", "7,7,9")
    texts, reports = chat(path, 60, "3,1", "2,5", "^7,7,9")
    assert [texts[0], texts[2]] == expected[0]
    # The replaced turn has added the last token of the first answer to the cache.
    reused = [int(report.split(", ")[2].split()[0]) for report in (expected[1][1], reports[2])]
    assert reused[1] == reused[0] + 1 > 1
    # A program that can rewind by 2 positions only, as with a ring buffer, computes the prompt again.
    short = tmp_path / "short.pte"
    programs.export(short, programs.summed, state=state, max_context_len=64, get_max_rewind=2, **options)
    again, reports = chat(short, 60, "3,1", "2,5", "^7,7,9")
    assert again == texts and reports[2].endswith(" 0 tokens reused")


def test_example_cancels_after_a_time(chat, program):
    path = program("endless_text", programs.successor, max_context_len=10**12)
    texts, reports = chat(path, 1, "1", "2")
    assert texts[0].startswith(b"\2\3\4")
    assert [line.partition(",")[0] for line in reports] == ["cancelled", "cancelled"]


def test_example_in_c(tmp_path):
    build = build_project(EXAMPLES / "c", tmp_path / "build")
    path = programs.export_rows(tmp_path / "rows.pte", 2)
    command = [build / "answers", path, "3", "65,66", "97", "49"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "CDE\nbcd\n234\n"
    assert done.stderr.count("3 tokens, 0 of the prompt reused\n") == 3
    done = subprocess.run(list(map(str, [*command, "256"])), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "CDE\nbcd\n234\n"
    assert "256: prompt: id 256 is outside the vocabulary [0, 256)" in done.stderr


def test_example_of_a_module_in_cpp(tmp_path):
    """examples/cpp_module, which docs/cpp-api.md shows: a program of two nodes, of which one is not delegated."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return x * 2, torch.nonzero(x)

    exported = torch.export.export(Model(), (torch.ones(2, 3),))
    path = tmp_path / "model.pte"
    path.write_bytes(to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch().buffer)
    build = build_project(EXAMPLES / "cpp_module", tmp_path / "build")
    done = subprocess.run([str(build / "run_module"), str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[ 2 3 ] 2 2 2 2 2\n[ 6 2 ]\n"


@pytest.fixture(scope="module")
def stress(tmp_path_factory):
    return build_project(STRESS, tmp_path_factory.mktemp("stress")) / "stress"


def test_failing_allocation_ends_its_request_only(stress, tmp_path):
    path = programs.export_rows(tmp_path / "rows.pte", 4)
    program = stress.with_name("failing_allocations")
    done = subprocess.run([str(program), str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    failed, *rest = done.stdout.split()
    assert int(failed) > 50 and rest == ["failed,", "0", "wrong"]


def test_methods_of_the_engine_in_cpp(stress, tmp_path_factory, tmp_path):
    path = engine_rows.export(tmp_path_factory, "engine_one_row", outputs="both")
    done = subprocess.run([str(stress), str(path), f"{tmp_path}/x.cache"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    prompt, targets = [5, 300, 12, 7], [31, 32]
    with api.Engine(path) as engine:
        (first, second), greedy = engine.score(prompt, targets)
        top = [[number for pair in row.items() for number in pair] for row in engine.score_top(prompt, targets, 2)]
    length, *scores, drawn, closed = done.stdout.splitlines()
    expected = [first, int(greedy[0]), second, int(greedy[1]), *top[0], *top[1]]
    assert [float(number) for line in scores for number in line.split()] == pytest.approx(expected, rel=1e-4)
    assert (length, drawn, closed) == ("4", "6", "engine: it is closed")


def test_token_bytes_can_be_added_in_cpp(stress, program):
    path = program("no_table", programs.successor, vocabulary=None)
    done = subprocess.run([str(stress), str(path), "text"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 7 8 token_bytes: the program has token bytes already\n"


def test_requests_from_many_threads(stress, tmp_path):
    path = programs.export_rows(tmp_path / "rows.pte", 4)
    done = subprocess.run([str(stress), str(path), "3000"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    requests = 3000 + len(range(0, 3000, 14))  # those that replace another
    assert done.stdout.endswith(f" 0 wrong, {requests} requests, 0 left\n") and int(done.stdout.split()[0]) > 1000


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"sampling_head": False}, "forward: got 7 inputs, expected 2 according to the metadata"),
        ({"sampling_head": 1}, "sampling_head: expected one bool"),
        ({"get_vocab_size": None}, "missing method get_vocab_size"),
        ({"get_vocab_size": "256"}, "get_vocab_size: expected one integer"),
        ({"get_vocab_size": 0}, "get_vocab_size: got 0, expected at least 1"),
        ({"get_max_seq_len": 17}, "get_max_seq_len: got 17, expected 1 to 16 (get_max_context_len)"),
        (
            {"get_max_seq_len": 9},
            "input 0 (tokens): got size 8 on axis 1, expected at least 9 according to the metadata",
        ),
        ({"max_seq_len": 2**28, "max_context_len": 2**28}, "the inputs take 2048 MiB of memory, expected at most 1024"),
        ({"get_max_batch_size": 2}, "missing method prefill; the methods are: "),
        ({"get_max_batch_size": 0}, "get_max_batch_size: got 0, expected at least 1"),
        ({"sampling_penalties": True}, "forward: got 7 inputs, expected 10 according to the metadata"),
        ({"sampling_logit_bias": -1}, "sampling_logit_bias: got -1, expected at least 0"),
        ({"sampling_logit_bias": 2**32}, "sampling_logit_bias: got 4294967296, expected at most 2147483647"),
        ({"get_vocab_size": 2**40}, "get_vocab_size: got 1099511627776, expected at most 2147483647"),
        ({"sampling_seed": False}, "forward: got 7 inputs, expected 6 according to the metadata"),
        ({"sampling_seed": 1}, "sampling_seed: expected one bool"),
        ({"tensor_parallel_size": 2}, "the model was exported in parts by an earlier version; export it again"),
        ({"get_eos_ids": [1, 2.5]}, "get_eos_ids: expected integers or a tensor of integers"),
        ({"token_offsets": torch.arange(9)}, "token_offsets: got 9 entries, expected 257 (get_vocab_size + 1)"),
        ({"token_offsets": torch.arange(257) * 2}, "token_offsets: expected ascending values from 0 to 256"),
        ({"token_bytes": torch.zeros(256)}, "token_bytes: got Float of rank 1, expected Byte of rank 1"),
    ],
    ids=lambda value: repr(next(iter(value.items())))[:40] if isinstance(value, dict) else "",
)
def test_invalid_metadata_is_an_error(run, tmp_path, metadata, message):
    path = programs.export(tmp_path / "model.pte", programs.successor, **metadata)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert done.stdout == ""
    assert message in done.stderr


def test_sizes_that_contradict_the_program_take_no_memory(tmp_path):
    """The metadata are compared with the program before its inputs get memory: here 2 GiB."""
    path = programs.export(tmp_path / "model.pte", programs.successor, get_max_seq_len=2**28, get_max_context_len=2**28)
    before = peak_gigabytes()
    with pytest.raises(api.ApiError, match="got size 8 on axis 1, expected at least 268435456"):
        api.Model(path)
    assert peak_gigabytes() - before < 0.5


def test_eos_ids_may_be_a_tensor(run, tmp_path):
    path = programs.export(tmp_path / "model.pte", programs.successor, get_eos_ids=torch.tensor([4, 9]))
    assert run(path, "--prompt-ids", "1", "--ids").ids == [2, 3]


def test_wrong_input_dtype_is_an_error(run, tmp_path, monkeypatch):
    monkeypatch.setitem(programs.OPTIONAL, "top_k", torch.tensor(0.0))
    path = programs.export(tmp_path / "model.pte", programs.successor)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert "forward: input 5 (top_k): got Float of rank 0, expected Long of rank 0" in done.stderr


def test_wrong_output_dtype_is_an_error(run, tmp_path):
    def float_token(self, tokens, input_pos, **_):
        return tokens[:, -1].to(torch.float32)

    done = run(programs.export(tmp_path / "model.pte", float_token), "--prompt-ids", "1")
    assert done.code == 1
    assert "forward: output: got Float, expected tokens (Long)" in done.stderr


@pytest.mark.parametrize(
    ("output", "value", "message"),
    [
        (1, torch.zeros(1, dtype=torch.float16), "forward: output 1: got Half, expected Float"),
        (2, torch.zeros(1, 2, dtype=torch.int32), "forward: output 2: got Int, expected Long"),
        (2, torch.tensor([[3, 256]]), "forward: returned the token 256, which is outside the vocabulary [0, 256)"),
        (3, torch.zeros(1, 2, dtype=torch.float16), "forward: output 3: got Half, expected Float"),
    ],
)
def test_wrong_log_probabilities_are_an_error(tmp_path, monkeypatch, output, value, message):
    def rule(self, tokens, input_pos, **_):
        outputs = [tokens[:, -1] + 0, torch.zeros(1), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2)]
        outputs[output] = value.clone()
        return tuple(outputs)

    monkeypatch.setitem(programs.OPTIONAL, "logprobs", torch.tensor(0))
    path = programs.export(tmp_path / "model.pte", rule, optional=("logprobs",), sampling_logprobs=2)
    with api.Engine(path) as engine, engine.submit([1], logprobs=2) as request:
        assert request.wait() and (request.finish, request.error) == (api.FINISH_ERROR, message)


def test_token_outside_the_vocabulary_is_an_error(run, tmp_path):
    def unlimited_successor(self, tokens, input_pos, **_):
        return tokens[:, -1] + 1

    path = programs.export(tmp_path / "model.pte", unlimited_successor)
    done = run(path, "--prompt-ids", "254", "--ids")
    assert done.code == 1
    assert done.stdout == "255\n"
    assert done.finish == "error"
    assert "forward: returned the token 256, which is outside the vocabulary [0, 256)" in done.stderr


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("token_bytes", "token_bytes: the tensor has no memory"),
        ("get_eos_ids", "get_eos_ids: the tensor has no memory"),
        ("forward", "forward: an output has no memory"),
    ],
)
def test_result_without_memory_is_an_error(run, tmp_path, method, message):
    """The program names no memory for the result of the method, and no instruction writes it."""
    path = programs.export(tmp_path / "model.pte", programs.successor, get_eos_ids=torch.tensor([4]))
    file = deserialize_pte_binary(path.read_bytes())
    (plan,) = (plan for plan in file.program.execution_plan if plan.name == method)
    result = plan.values[plan.outputs[0]].val
    result.data_buffer_idx, result.allocation_info, plan.chains[0].instructions = 0, None, []
    path.write_bytes(bytes(serialize_pte_binary(file)))
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1 and message in done.stderr


def test_missing_forward_is_an_error(run, tmp_path):
    from executorch.exir import to_edge

    program = torch.export.export(torch.nn.ReLU(), (torch.zeros(2),))
    path = tmp_path / "model.pte"
    path.write_bytes(to_edge({"encode": program}).to_executorch().buffer)
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert "missing method forward; the methods are: encode" in done.stderr


@pytest.mark.parametrize("keep", [8, 100, 0.5, 0.99])
def test_truncated_file_is_an_error(run, successor, tmp_path, keep):
    data = successor.read_bytes()
    path = tmp_path / "cut.pte"
    path.write_bytes(data[: keep if keep >= 1 else int(len(data) * keep)])
    done = run(path, "--prompt-ids", "1")
    assert done.code == 1
    assert "not an ExecuTorch program" in done.stderr
