"""The command executorch-mlx batch with files of requests."""

import asyncio
import json
from importlib.util import find_spec

import killed
import pytest
from executorch_mlx.batch import AnswerFile, run
from executorch_mlx.batch.request_file import Request, request_id
from executorch_mlx.batch.run import error_answer
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM

REQUEST_COUNT = 200


def line(custom_id="a", url="/v1/completions", method="POST", model="batch", **body):
    body = {"model": model, "prompt": [5, 6], "max_tokens": 2, "temperature": 0} | body
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def batch(program, requests, output, *options) -> int:
    return main(["batch", str(program), str(requests), "-o", str(output), "--name", "batch", *options])


def answers_in(path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def requests(tmp_path_factory):
    path = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    killed.write_requests(path, REQUEST_COUNT, "batch")
    return path


@pytest.fixture(scope="module")
def texts(batch_program, requests):
    """The texts of the answers by custom_id. `LLM` generates them, one request at a time."""
    with LLM.load(batch_program) as llm:

        def answer(body):
            start, prompt = (llm.chat, body["messages"]) if "messages" in body else (llm.generate, body["prompt"])
            return start(prompt, max_new_tokens=body["max_tokens"]).result().text

        lines = map(json.loads, requests.read_text().splitlines())
        return {request["custom_id"]: answer(request["body"]) for request in lines}


def test_killed_batch_resumes_without_repeating_or_losing_a_line(batch_program, requests, texts, tmp_path):
    output = tmp_path / "answers.jsonl"
    command = [*killed.COMMAND, batch_program, requests, "-o", output, "--name", "batch"]
    points = killed.run_and_kill(command, output, REQUEST_COUNT, kills=3, seed=1)
    assert 0 < points[0] < points[1] < points[2] < REQUEST_COUNT
    assert killed.texts_in(output) == texts


def test_answers_have_the_format_of_openai(batch_program, tmp_path, capfd):
    requests, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text(f"{line('one')}\n\n{line('two')}\n")  # the blank line is not a request
    assert batch(batch_program, requests, output) == 0
    assert "2 of 2 requests answered in this run, 0 with an error" in capfd.readouterr().err
    one, two = sorted(answers_in(output), key=lambda answer: answer["custom_id"])
    assert one.keys() == {"id", "custom_id", "response", "error"} and one["error"] is None
    assert one["response"].keys() == {"status_code", "request_id", "body"} and one["response"]["status_code"] == 200
    assert one["response"]["body"]["object"] == "text_completion"
    assert one["id"] != two["id"] and one["response"]["request_id"] != two["response"]["request_id"]

    before = output.read_bytes()
    assert batch(tmp_path / "no.pte", requests, output) == 0  # the model is not even loaded
    assert output.read_bytes() == before
    assert "all 2 requests are answered already" in capfd.readouterr().err

    requests.write_text(f"{line('one')}\n\n{line('two')}\n{line('three')}\n")
    assert batch(batch_program, requests, output) == 0
    assert [answer["custom_id"] for answer in answers_in(output)][2:] == ["three"]
    assert output.read_bytes().startswith(before)


# (line, expected result). The result is None for a valid request, a string for the code of an error in the line, and an
# integer for the HTTP status of an endpoint's error.
LINES = [
    (line("valid"), None),
    ("{", "invalid_json"),
    ("[]", "invalid_json"),
    ('"\\ud800', "invalid_json"),
    ("[" * 100_000, "invalid_json"),
    (b"\xff\xfe{", "invalid_json"),
    ("{}", "invalid_request"),
    (line(custom_id=""), "invalid_request"),
    (line("get", method="GET"), "invalid_request"),
    (line("path", url="v1/completions"), "invalid_request"),
    (line("characters", url="/v1/\ud800"), "invalid_request"),
    (line("stream", stream=True), "invalid_request"),
    ('{"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": 3}', "invalid_request"),
    ('{"custom_id": "more", "method": "POST", "url": "/v1/completions", "body": {}, "x": 1}', "invalid_request"),
    (line("valid"), "duplicate_custom_id"),
    (line("path404", url="/v1/nothing"), 404),
    (line("model", model="other"), 404),
    (line("empty", prompt=[]), 400),
    (line("long", prompt=[5] * 5000), 400),
    (line("field", nonsense=1), None),
    (line("unsupported", mirostat=2), 400),
    (line("value", top_p=7), 400),
    (line("surrogate \ud800", prompt="a \ud800"), 400),
    (line("large", prompt="x" * 17 * 2**20), 400),  # larger than a server takes, but what is wrong is the prompt
    (line("last"), None),
]


def test_each_invalid_line_has_an_error_and_all_others_are_answered(batch_program, tmp_path):
    requests, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    encoded = [text if isinstance(text, bytes) else text.encode() for text, _ in LINES]
    requests.write_bytes(b"\n".join(encoded))  # without a newline at the end
    assert batch(batch_program, requests, output) == 0
    answers = {int(answer["id"].split("_")[2]): answer for answer in answers_in(output)}
    assert answers.keys() == set(range(1, len(LINES) + 1))
    for number, (text, expected) in enumerate(LINES, 1):
        answer = answers[number]
        if isinstance(expected, str):
            assert (answer["error"]["code"], answer["response"]) == (expected, None), text
            assert answer["error"]["message"]
        else:
            assert answer["response"]["status_code"] == (expected or 200), (text, answer)
            assert answer["custom_id"] == json.loads(text)["custom_id"]
    assert killed.text_of(answers[1]) == killed.text_of(answers[len(LINES)])


def test_overlong_line_is_an_error(tmp_path, monkeypatch):
    from executorch_mlx.batch import RequestLines, request_file

    monkeypatch.setattr(request_file, "MAX_LINE", 200)
    path = tmp_path / "requests.jsonl"
    fits = line("fits").ljust(200)
    path.write_text("\n".join([fits, "x" * 201, "x" * 1000, line("last")]))
    codes = [(request.custom_id, request.error and request.error.code) for request in RequestLines(path)]
    assert codes == [("fits", None), (None, "line_too_long"), (None, "line_too_long"), ("last", None)]


def test_incomplete_last_line_is_dropped_wherever_it_ends(tmp_path):
    path, whole = tmp_path / "answers.jsonl", []
    with AnswerFile(path) as file:
        for number in range(1, 4):
            answer = {"id": f"batch_req_{number}_{number:016}", "custom_id": "x" * 40_000 * (number - 1)}
            file.write(answer | {"response": None, "error": {"code": "c", "message": "m"}})
            whole.append(path.stat().st_size)
    data = path.read_bytes()
    for size in [*range(1, 80), *(end + step for end in whole for step in (-40_000, -2, -1, 0))]:
        if 0 < size <= len(data):
            path.write_bytes(data[:size])
            with AnswerFile(path) as file:
                assert len(file.answered) == sum(end <= size for end in whole), size
            assert path.read_bytes() == data[: max((end for end in whole if end <= size), default=0)]


def test_files_that_do_not_belong_together_are_refused(tmp_path, capfd):
    requests, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text(line())
    program = tmp_path / "no.pte"

    def error_with(content: str) -> str:
        output.write_text(content)
        assert batch(program, requests, output) == 1
        assert output.read_text() == content
        return capfd.readouterr().err

    assert "line 1 is not an answer of a batch" in error_with("my notes")
    assert "line 1 is not an answer of a batch" in error_with("my notes\n")
    assert "line 1 is not an answer of a batch" in error_with('{"my": 1}\n{"notes": 2}')
    other = '{"id": "batch_req_%d_0123456789abcdef", "response": null, "error": {"message": "m"}}\n'
    assert "line 2 is not an answer" in error_with(f"{other % 1}{{}}\n")
    for rest in ["", ', "error": null', ', "response": {"status_code": 200}, "error": null', ', "error": {}']:
        assert "line 1 is not an answer" in error_with(f'{{"id": "batch_req_1_0123456789abcdef"{rest}}}\n')
    assert "has an answer for request 1 whose id is batch_req_1_0123456789abcdef" in error_with(other % 1)
    assert "1 requests that" in error_with(other % 2)
    assert batch(program, requests, requests) == 1
    assert "expected another file than that of the requests" in capfd.readouterr().err
    with AnswerFile(tmp_path / "locked.jsonl"):
        assert batch(program, requests, tmp_path / "locked.jsonl") == 1
    assert "another process writes the answers" in capfd.readouterr().err


@pytest.mark.parametrize(
    "input, output, options, message",
    [
        ("r.txt", "a.jsonl", [], "r.txt: got the suffix '.txt', expected .jsonl, .csv or .parquet"),
        ("r.jsonl", "a.csv", [], "a.csv: got the suffix '.csv', expected .jsonl"),
        ("r.jsonl", "a.jsonl", ["--column", "x"], "--column: expected a table (.csv or .parquet)"),
        ("none.jsonl", "a.jsonl", [], "No such file"),
    ],
)
def test_invalid_files_and_options_are_errors(input, output, options, message, tmp_path, capfd):
    (tmp_path / "r.jsonl").write_text(line())
    assert batch(tmp_path / "no.pte", tmp_path / input, tmp_path / output, *options) == 1
    assert message in capfd.readouterr().err


def test_batch_goes_on_while_no_engine_is_ready():
    """The engine of each request dies, so that none is ready when its answer, an error, is complete."""

    class NoEngine:
        width = 0

        async def answer(self, request):
            return error_answer(request, "engine_died", "the engine died")

    requests = [Request(request_id(number, b""), str(number)) for number in (1, 2, 3)]
    answers = []
    asyncio.run(run.answer_all(requests, NoEngine(), answers.append))
    assert [answer["custom_id"] for answer in answers] == ["1", "2", "3"]


def test_requests_start_as_soon_as_the_width_grows(monkeypatch):
    """Engines become ready while a request runs. The next request does not wait for its answer."""
    monkeypatch.setattr(run, "WATCH_SECONDS", 0.01)

    class GrowingWorkers:
        width = 0

        def __init__(self):
            self.second_started = asyncio.Event()

        async def answer(self, request):
            if request.custom_id == "2":
                self.second_started.set()
            self.width = 3
            await self.second_started.wait()
            return error_answer(request, "", "")

    async def work():
        await asyncio.wait_for(run.answer_all(requests, GrowingWorkers(), answers.append), timeout=60)

    requests = [Request(request_id(number, b""), str(number)) for number in (1, 2)]
    answers = []
    asyncio.run(work())
    assert {answer["custom_id"] for answer in answers} == {"1", "2"}


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_option_ray_is_an_error_if_ray_is_not_installed(tmp_path, capfd):
    (tmp_path / "r.jsonl").write_text(line())
    assert batch(tmp_path / "no.pte", tmp_path / "r.jsonl", tmp_path / "a.jsonl", "--ray") == 1
    assert "batch needs ray: pip install 'executorch-mlx[ray]'" in capfd.readouterr().err


def test_every_endpoint_of_the_server_works(batch_program, tmp_path, capfd):
    requests, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    body = {"model": "batch", "input": "Hello", "max_output_tokens": 3, "temperature": 0}
    requests.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}))
    assert batch(batch_program, requests, output) == 0
    assert answers_in(output)[0]["response"]["body"]["object"] == "response"
    assert "3 generated tokens" in capfd.readouterr().err
