"""The argument --adapter of the commands that run a model."""

import argparse
import json

import pytest
from executorch_mlx.cli import adapter_arguments, export_arguments
from executorch_mlx.cli.adapter_arguments import AdapterFolder
from executorch_mlx.cli.main import main
from executorch_mlx.llm import LLM

PROMPT = "Return the"


def parsed(*values: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    adapter_arguments.add_to(parser)
    return parser.parse_args([word for value in values for word in ("--adapter", value)])


def answers(program, folder) -> list[list[int]]:
    with LLM.load(program) as llm:
        llm.load_adapter("poet", folder)
        return [llm.generate(PROMPT, max_new_tokens=8, adapter=name).result().tokens for name in (None, "poet")]


def test_run_answers_with_an_adapter(adapter_program, adapter_folders, capsys):
    words = ["run", str(adapter_program), "--no-chat", "--prompt", PROMPT, "--max-new-tokens", "8", "--json"]
    assert main([*words, "--temperature", "0", "--adapter", f"poet={adapter_folders['peft']}"]) == 0
    plain, adapted = answers(adapter_program, adapter_folders["peft"])
    assert json.loads(capsys.readouterr().out)["tokens"] == adapted != plain


def test_requests_of_a_batch_name_adapters(adapter_program, adapter_folders, tmp_path):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body | {"model": name}}
        for name in (adapter_program.stem, "poet", "unknown")
    ]
    file, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    command = ["batch", str(adapter_program), str(file), "-o", str(output)]
    assert main([*command, "--adapter", f"poet={adapter_folders['mlx']}"]) == 0
    found = {line["custom_id"]: line["response"] for line in map(json.loads, output.read_text().splitlines())}
    texts = [found[line["custom_id"]]["body"].get("choices", [{}])[0].get("text") for line in lines]
    with LLM.load(adapter_program) as llm:
        assert texts[:2] == [llm.text(tokens) for tokens in answers(adapter_program, adapter_folders["mlx"])]
    assert found["unknown"]["status_code"] == 404


@pytest.mark.parametrize(
    "words, message",
    [
        (["--adapter", "a=FOLDER", "--adapter", "b=FOLDER"], "--adapter: got 2 adapters, expected one"),
        (["--adapter", "a=FOLDER", "--adapter", "a=FOLDER"], "--adapter: got the name a twice"),
        (["--adapter", "FOLDER"], "--adapter: PROGRAM is exported already, expected a checkpoint; write NAME=DIR"),
        (["--adapter", "a=/none"], "--adapter a: /none/adapter_config.json: No such file or directory"),
    ],
    ids=["several", "twice", "merge", "missing"],
)
def test_wrong_adapters(adapter_program, adapter_folders, capsys, words, message):
    words = [word.replace("FOLDER", str(adapter_folders["peft"])) for word in words]
    assert main(["run", str(adapter_program), "--prompt", PROMPT, *words]) == 1
    assert message.replace("PROGRAM", str(adapter_program)) in capsys.readouterr().err


def test_a_checkpoint_is_exported_with_room(adapter_folders):
    folders = adapter_arguments.named(parsed(f"a={adapter_folders['peft']}", f"b={adapter_folders['mlx']}"))
    assert [folder.name for folder in folders] == ["a", "b"]
    assert adapter_arguments.room(folders, {}) == {"adapters": 4, "lora_rank": 16}
    assert adapter_arguments.room(folders * 3, {"lora_rank": 8}) == {"adapters": 6}
    assert adapter_arguments.room([], {}) == {}


def test_a_folder_without_a_name_is_merged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = parsed("sub/a=b", "x=y=z")
    assert adapter_arguments.merged(options) == {"adapter": str(tmp_path / "sub" / "a=b")}
    assert adapter_arguments.named(options) == [AdapterFolder(type(tmp_path)("y=z"), "x")]


def test_names_of_layers_are_one_argument():
    command = export_arguments.flags({"adapters": 2, "adapter_targets": ["q_proj", "*.mlp.*"]})
    assert command == "--adapters 2 --adapter-targets 'q_proj,*.mlp.*'"
