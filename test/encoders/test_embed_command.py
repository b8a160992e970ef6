"""The commands that run encoders: embed, batch and run; the export by its command, and Ray Data's class."""

import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import small_encoder
from executorch_mlx.cli.main import main
from executorch_mlx.encoders import Encoder
from executorch_mlx.ray.embed import Embed

TEXTS = ["the cat sat on the mat", "a dog", "x y z"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program of a small BERT, exported by the command."""
    folder = small_encoder.save_sentence_transformer(tmp_path_factory.mktemp("embed") / "model")
    path = folder.parent / "small.pte"
    command = [sys.executable, "-m", "executorch_mlx", "export", str(folder), "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "methods      encode_text" in done.stdout and "verified     encode_text: largest" in done.stdout
    return path


@pytest.fixture(scope="module")
def vectors(program):
    with Encoder(program) as encoder:
        return encoder.encode(TEXTS)


def embed(program, *arguments) -> int:
    return main(["embed", str(program), *map(str, arguments)])


def test_texts_as_arguments(program, vectors, capsys):
    assert embed(program, *TEXTS) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == TEXTS
    assert (np.array([row["embedding"] for row in rows], np.float32) == vectors).all()
    assert embed(program, "the cat", "--dimensions", "4", "--prompt-name", "query") == 0
    assert len(json.loads(capsys.readouterr().out)["embedding"]) == 4


def test_files_in_and_out(program, vectors, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"id": [0, 1, 2], "body": TEXTS}), tmp_path / "a.parquet")
    assert embed(program, "--input", tmp_path / "a.txt", "-o", tmp_path / "b.npy") == 0
    assert (np.load(tmp_path / "b.npy") == vectors).all()
    assert embed(program, "--input", tmp_path / "a.jsonl", "--column", "body", "-o", tmp_path / "b.parquet") == 0
    assert embed(program, "--input", tmp_path / "a.parquet", "--column", "body", "-o", tmp_path / "b.jsonl") == 0
    table = pyarrow.parquet.read_table(tmp_path / "b.parquet").to_pydict()
    rows = [json.loads(line) for line in (tmp_path / "b.jsonl").read_text().splitlines()]
    for ids, found in (
        (table["id"], table["embedding"]),
        ([row["id"] for row in rows], [row["embedding"] for row in rows]),
    ):
        assert ids == [0, 1, 2] and (np.array(found, np.float32) == vectors).all()
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a", "--input", "b.txt"], "--input: got TEXT as well, expected one of them"),
        (["--input", "b.csv"], "b.csv: got the suffix '.csv', expected .txt, .jsonl or .parquet"),
        (["a", "-o", "b.txt"], "-o b.txt: got the suffix '.txt', expected .npy, .jsonl or .parquet"),
        (["a", "-o", "missing/b.npy"], "-o missing/b.npy: expected a file in an existing folder"),
        (["a", "--dimensions", "99"], "dimensions: got 99, expected 1 to 32"),
        (["a", "--prompt-name", "x"], "prompt_name: got 'x', expected query"),
    ],
)
def test_wrong_arguments(program, arguments, message, capsys):
    assert embed(program, *arguments) == 1
    assert capsys.readouterr().err == f"executorch-mlx: {message}\n"


def test_commands_for_other_models_say_what_they_got(program, chat_program, capsys):
    assert main(["run", str(program), "--prompt", "a"]) == 1
    assert "got an encoder, expected a language or speech model; executorch-mlx embed" in capsys.readouterr().err
    assert embed(chat_program, "a") == 1
    assert "expected an encoder" in capsys.readouterr().err


def test_batch_files(program, vectors, tmp_path):
    requests = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": "small", "input": text}}
        for i, text in enumerate(TEXTS)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, requests)))
    assert main(["batch", str(program), str(tmp_path / "a.jsonl"), "-o", str(tmp_path / "b.jsonl")]) == 0
    for line in (tmp_path / "b.jsonl").read_text().splitlines():
        answer = json.loads(line)
        body = answer["response"]["body"]
        assert (np.array(body["data"][0]["embedding"], np.float32) == vectors[int(answer["custom_id"])]).all()


def test_batch_tables(program, vectors, tmp_path):
    texts = pyarrow.array([*TEXTS, None], pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    arguments = ["batch", str(program), str(tmp_path / "a.parquet"), "--embed", "--column", "text"]
    assert main([*arguments, "--answer-column", "vector", "-o", str(tmp_path / "b.parquet")]) == 0
    table = pyarrow.parquet.read_table(tmp_path / "b.parquet")
    assert table.schema.field("vector").type == pyarrow.list_(pyarrow.float32())
    *found, missing = table.to_pylist()
    assert (np.array([row["vector"] for row in found], np.float32) == vectors).all()
    assert missing["vector"] is None and missing["vector_error"].startswith("input: got null")


def test_batches_of_ray_data(program, vectors):
    add = Embed(program, column="body", output="vector", dimensions=8, normalize=False)
    batch = add({"body": np.array(TEXTS, object), "id": np.arange(3)})
    assert (batch["vector"] == vectors[:, :8]).all() and batch["id"].tolist() == [0, 1, 2]


def test_checkpoints_are_exported_once(program, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = program.parent / "model"
    assert embed(folder, "a", "--no-verify") == 0
    assert "exporting it once" in capfd.readouterr().err
    assert embed(folder, "a", "--no-verify") == 0
    assert "exporting" not in capfd.readouterr().err
    pooling = folder / "1_Pooling" / "config.json"
    settings = json.loads(pooling.read_text())
    small_encoder.write(pooling, settings | {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True})
    try:
        assert embed(folder, "a", "--no-verify") == 0  # also a file in a folder of a part is a part of the checkpoint
        assert "exporting it once" in capfd.readouterr().err
    finally:
        small_encoder.write(pooling, settings)
