"""executorch-mlx export: from a folder to a file that runs."""

from pathlib import Path

import pytest
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.cli.main import main
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
PROMPT = [5, 17, 200, 3, 77]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A LoRA adapter that changes what the model says."""
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


def test_an_adapter_is_merged(adapter, tmp_path, capsys):
    folder, merged = adapter
    file = tmp_path / "model.pte"
    arguments = ["export", str(MODEL), "-o", str(file), "--adapter", str(folder), "--unseeded", "--max-seq-len", "64"]
    assert main(arguments) == 0
    told = capsys.readouterr()
    assert "nodes delegated to MLX" in told.out and "sampling_seed=False" in told.out
    assert "merge the adapter" in told.err
    program = LLM.load(file)
    assert program.program.get("get_max_context_len") == 64
    expected = greedy(merged)
    stop = next((i for i, t in enumerate(expected) if t in program.eos_ids), len(expected))
    assert program.generate(PROMPT, max_new_tokens=16).result().tokens == expected[:stop]


def test_int4_is_smaller_and_runs(tmp_path):
    file = tmp_path / "model.pte"
    assert main(["export", str(MODEL), "-o", str(file), "--quantize", "int4", "--group-size", "32", "--dtype", "bfloat16"]) == 0
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(MODEL).parameters())
    # 4 bits and two bfloat16 for 32 weights; the rest is norms, tokenizer and instructions.
    assert weights * 5 / 8 < file.stat().st_size < weights * 5 / 8 + 500_000
    tokens = LLM.load(file).generate(PROMPT, max_new_tokens=8).result().tokens
    assert tokens and all(0 <= t < 1536 for t in tokens)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--adapter", "/nowhere"], "adapter is /nowhere, which has no adapter_config.json"),
        (["--max-seq-len", "100000"], "max_seq_len is 100000, expected 2 to 512"),
        (["--batch", "0"], "batch is 0, expected at least 1"),
        (["--penalties", "-1"], "penalties is -1, expected at least 0"),
        (["--chunk", "1"], "chunk is 1, expected at least 2"),
        (["--sampling", "logits", "--penalties", "8"], "sampling.penalties is a parameter of the head"),
        (["--sampling", "logits", "--unseeded"], "--unseeded belongs to a head"),
        (["--group-size", "32"], "--group-size belongs to --quantize"),
        (["-o", "/nowhere/x.pte"], "--output is /nowhere/x.pte, expected a file in a folder that is there"),
    ],
)
def test_what_is_out_of_range_is_told(arguments, message, tmp_path, capsys):
    assert main(["export", str(MODEL), "-o", str(tmp_path / "x.pte"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.pte").exists()
