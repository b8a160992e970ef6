"""ExecuTorch's own LLM runner, from the installed package, runs a program that returns logits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from executorch_mlx.llm.export import export_llm
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
PROMPT, STEPS = "The cat", 32

RUN = """
import json, sys
from executorch_mlx import load_delegate
load_delegate()
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
model, tokenizer, prompt, steps = sys.argv[1:]
runner = TextLLMRunner(model, tokenizer)
pieces = []
config = GenerationConfig(echo=False, temperature=0.0, max_new_tokens=int(steps))
runner.generate(prompt, config, pieces.append)
print("RESULT", json.dumps("".join(pieces)))
"""


@pytest.mark.parametrize("portable", [False, True], ids=["default", "portable"])
def test_greedy_text_equals_transformers(tmp_path, portable):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokens = tokenizer(PROMPT, return_tensors="pt").input_ids
    generated = model.generate(tokens, do_sample=False, max_new_tokens=STEPS, pad_token_id=0)[0]
    expected = tokenizer.decode(generated[tokens.shape[1] :], skip_special_tokens=True)

    path = tmp_path / "model.pte"
    export_llm(MODEL, outputs="logits", chunk=64, portable=portable).save(path)
    done = subprocess.run(
        [sys.executable, "-c", RUN, path, MODEL / "tokenizer.json", PROMPT, str(STEPS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    text = json.loads(line.removeprefix("RESULT "))
    assert text.removesuffix("</s>") == expected and len(expected) > 20
