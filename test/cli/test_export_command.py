"""`executorch-mlx export`: from a checkpoint to a program that runs."""

import atexit
import gc
import os
from pathlib import Path

import pytest
import torch
from executorch_mlx.cli.main import main
from executorch_mlx.inspect.pte import read_pte
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export.serialize import PAGE
from executorch_mlx.llm.sampling_parameters import PARAMETERS
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
PROMPT = [5, 17, 200, 3, 77]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The folder of a LoRA adapter that changes the answer, and the merged model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder, adapted.merge_and_unload()


def greedy(model, steps=16):
    model.generation_config.eos_token_id = None
    tokens = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=steps, pad_token_id=0)
    return tokens[0, len(PROMPT) :].tolist()


def test_export_merges_an_adapter(adapter, tmp_path, capsys):
    folder, merged = adapter
    file = tmp_path / "model.pte"
    arguments = [
        "export",
        str(MODEL),
        "-o",
        str(file),
        "--adapter",
        str(folder),
        "--unseeded",
        "--max-context-len",
        "64",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "nodes delegated to MLX" in printed.out and "sampling_seed=False" in printed.out
    assert "merge the adapter" in printed.err
    llm = LLM.load(file)
    assert llm.program.get("get_max_context_len") == 64 and llm.program.rows == 4
    assert llm.program.logprobs == 20 and all(map(llm.program.takes, PARAMETERS.keys() - {"seed"}))
    expected = greedy(merged)
    assert expected != greedy(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    assert llm.generate(PROMPT, max_new_tokens=16, ignore_eos=True).result().tokens == expected


def test_int4_is_smaller_and_runs(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda function, *args: at_exit.append(function) or function)
    file = tmp_path / "model.pte"
    flags = ["--quantize", "int4", "--group-size", "32", "--dtype", "bfloat16", "--outputs", "both"]
    assert main(["export", str(MODEL), "-o", str(file), *flags]) == 0
    assert gc.freeze in at_exit  # so that the process ends without a search for cycles
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(MODEL).parameters())
    # A group of 32 weights takes 4 bits for each weight, and two bfloat16 values. The norms, the tokenizer and the
    # instructions need at most 500,000 bytes more. Each constant begins at a page, which is padded.
    padding = PAGE * len(read_pte(file).named_data)
    assert weights * 5 / 8 < file.stat().st_size < weights * 5 / 8 + 500_000 + padding
    llm = LLM.load(file)
    assert llm.program.rows == 1  # the default with logits, as ExecuTorch's own runner expects
    tokens = llm.generate(PROMPT, max_new_tokens=8, ignore_eos=True).result().tokens
    assert len(tokens) == 8 and all(0 <= t < 1536 for t in tokens)


def test_output_is_not_written_in_place_of_something_else(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert main(["export", str(MODEL), "-o", str(path)]) == 1
        assert f"--output: got {path}, expected a file in an existing folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--adapter", "/nowhere"], "adapter: /nowhere has no adapter_config.json"),
        (["--max-context-len", "100000"], "max_context_len: got 100000, expected 2 to 512"),
        (["--batch", "0"], "batch: got 0, expected at least 1"),
        (["--penalties", "-1"], "penalties: got -1, expected at least 0"),
        (["--chunk", "1"], "chunk: got 1, expected at least 2"),
        (["--outputs", "logits", "--penalties", "8"], "--penalties: got 8 with outputs 'logits', expected"),
        (["--outputs", "logits", "--unseeded"], "--unseeded: got --outputs logits, expected tokens or both"),
        (["--group-size", "32"], "--group-size: expected --quantize int4 or int8 as well"),
        (["-o", "/nowhere/x.pte"], "--output: got /nowhere/x.pte, expected a file in an existing folder"),
    ],
)
def test_an_invalid_argument_is_refused(arguments, message, tmp_path, capsys):
    assert main(["export", str(MODEL), "-o", str(tmp_path / "x.pte"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.pte").exists()
