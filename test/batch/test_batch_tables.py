"""The command executorch-mlx batch with columns of tables."""

import csv
import json

import pyarrow
import pyarrow.parquet
import pytest
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM

PROMPTS = ["Return the", "007", 'a "quoted", text\nof two lines', "Return the" * 600, "Return the"]
BODY = '{"max_tokens": 5, "temperature": 0}'
ERROR = "prompt: got 1201 tokens, expected 1 to 1024. This model's maximum context length is 1024 tokens"


@pytest.fixture(scope="module")
def texts(batch_program):
    """The text of the completion of each prompt, or None for the prompt that is too long."""
    with LLM.load(batch_program) as llm:
        answers = llm.generate_batch(PROMPTS, max_new_tokens=5)
        return [None if answer.error else answer.text for answer in answers]


def batch(program, table, output, *options) -> int:
    arguments = ["--column", "prompt", "--body", BODY, *options]
    return main(["batch", str(program), str(table), "-o", str(output), *arguments])


@pytest.fixture
def csv_table(tmp_path):
    path = tmp_path / "prompts.csv"
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["id", "prompt"], *([f"0{i}", text] for i, text in enumerate(PROMPTS))])
    return path


@pytest.fixture
def parquet_table(tmp_path):
    path = tmp_path / "prompts.parquet"
    columns = {"id": pyarrow.array(range(5), pyarrow.int16()), "prompt": PROMPTS, "tags": [["x"], [], None, ["y"], []]}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
    return path


def test_csv_in_and_out(batch_program, csv_table, texts, tmp_path, capfd):
    output = tmp_path / "answers.csv"
    assert batch(batch_program, csv_table, output) == 0
    with open(output, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["00", "01", "02", "03", "04"]
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["answer"] for row in rows] == [text or "" for text in texts]
    assert [row["answer_error"] for row in rows] == ["", "", "", ERROR, ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.csv", "prompts.csv"]

    assert batch(batch_program, csv_table, output) == 1
    assert "answers.csv exists: delete it" in capfd.readouterr().err
    assert batch(batch_program, csv_table, tmp_path / "b.csv", "--answer-column", "id") == 1
    assert "has a column id already" in capfd.readouterr().err
    assert batch(batch_program, csv_table, tmp_path / "b.csv", "--column", "x") == 1
    assert "got --column x, expected one of id, prompt" in capfd.readouterr().err


def test_parquet_in_and_out(batch_program, parquet_table, texts, tmp_path):
    output = tmp_path / "answers.parquet"
    assert batch(batch_program, parquet_table, output, "--answer-column", "said") == 0
    before, after = pyarrow.parquet.read_table(parquet_table), pyarrow.parquet.read_table(output)
    assert after.select(before.column_names) == before
    assert after["said"].to_pylist() == texts
    assert after["said_error"].to_pylist() == [None, None, None, ERROR, None]


def test_formats_can_be_mixed_and_a_killed_batch_resumes(batch_program, csv_table, parquet_table, texts, tmp_path):
    output = tmp_path / "answers.parquet"
    assert batch(batch_program, csv_table, tmp_path / "all.jsonl") == 0
    lines = (tmp_path / "all.jsonl").read_bytes().splitlines(keepends=True)
    ids = [json.loads(line)["custom_id"] for line in lines]
    assert sorted(ids) == [f"row-{number}" for number in range(1, 6)]
    # The file that a batch leaves if it is killed while it writes the fifth answer.
    (tmp_path / "answers.parquet.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:-5])
    assert batch(batch_program, csv_table, output) == 0
    table = pyarrow.parquet.read_table(output)
    assert table.column_names == ["id", "prompt", "answer", "answer_error"]
    assert table["answer"].to_pylist() == texts

    assert batch(batch_program, parquet_table, tmp_path / "answers.csv") == 0
    with open(tmp_path / "answers.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["answer"] for row in rows] == [text or "" for text in texts]
    assert [row["tags"] for row in rows] == ['["x"]', "[]", "", '["y"]', "[]"]


def test_chats_and_token_ids(batch_program, tmp_path):
    table, output = tmp_path / "prompts.parquet", tmp_path / "answers.parquet"
    messages = [[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}], None]
    columns = {"ids": [[5, 6, 7], [9]], "text": ["Hello", "You"], "chat": messages, "bytes": [b"x", b"y"]}
    pyarrow.parquet.write_table(pyarrow.table(columns), table)

    def answers(column, *options):
        output.unlink(missing_ok=True)
        assert batch(batch_program, table, output, *options, "--column", column) == 0
        result = pyarrow.parquet.read_table(output)
        return result["answer"].to_pylist(), result["answer_error"].to_pylist()

    with LLM.load(batch_program) as llm:

        def chat(*texts):
            roles = ["system", "user", "assistant"]
            chat = [{"role": role, "content": text} for role, text in zip(roles, texts) if text]
            return llm.chat(chat, max_new_tokens=5).result().text

        generated = [llm.generate(prompt, max_new_tokens=5).result().text for prompt in columns["ids"]]
        assert answers("ids") == (generated, [None, None])
        expected = [chat("Be brief", text) for text in columns["text"]]
        assert answers("text", "--chat", "--system", "Be brief") == (expected, [None, None])
        (first, second), (_, error) = answers("chat", "--chat")
        assert first == chat(None, "one", "two")
        assert second is None and "messages" in error
    assert answers("bytes") == ([None, None], ["bytes: got bytes, expected text or a list"] * 2)


def test_invalid_tables_are_errors(batch_program, tmp_path, capfd):
    for name, content, message in [
        ("a.csv", "", "expected a first line with different names"),
        ("a.csv", "prompt,prompt\n", "expected a first line with different names"),
        ("a.csv", "prompt,b\nx\n", "line 2 has 1 cells, expected 2"),
        ("a.csv", b"prompt\n\xff\n", "can't decode byte 0xff"),
        ("a.parquet", "prompt", "not a Parquet file"),
    ]:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        assert batch(batch_program, tmp_path / name, tmp_path / "out.csv") == 1
        assert message in capfd.readouterr().err
