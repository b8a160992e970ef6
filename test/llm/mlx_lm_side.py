"""Computes with mlx-lm what the tests compare with. Runs in a process of its own, which never loads the delegate.

    python mlx_lm_side.py PROMPT STEPS FOLDER=MODE,BITS,GROUP …

Each FOLDER is converted in float32 to FOLDER/mlx, run from there, and answered with
FOLDER/answer.safetensors: `logits` [S, V] of the prompt, `tokens` [STEPS] greedy.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
from mlx_lm import utils
from mlx_lm.convert import convert
from mlx_lm.generate import generate_step


def main() -> None:
    prompt, steps, *jobs = sys.argv[1:]
    prompt, steps = mx.array(json.loads(prompt)), int(steps)
    # The models have no tokenizer.
    utils.load_tokenizer = lambda *_, **__: SimpleNamespace(save_pretrained=lambda path: None)
    for job in jobs:
        folder, form = job.split("=")
        mode, bits, group = form.split(",")
        made = Path(folder) / "mlx"
        convert(folder, str(made), quantize=True, q_mode=mode, q_bits=int(bits), q_group_size=int(group),
                dtype="float32")
        model, _ = utils.load_model(made)
        answer = {"logits": model(prompt[None])[0]}
        if steps:
            tokens = [token for token, _ in generate_step(prompt, model, max_tokens=steps)]
            answer["tokens"] = mx.array(tokens)
        mx.save_safetensors(str(Path(folder) / "answer.safetensors"), answer)


main()
