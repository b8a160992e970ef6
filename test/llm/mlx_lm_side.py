"""Computes the expected logits and tokens with mlx-lm. Runs in a process of its own, which never loads the delegate.

    python mlx_lm_side.py PROMPT STEPS FOLDER=MODE,BITS,GROUP …

Converts the checkpoint in each FOLDER to FOLDER/mlx, in float32, and runs the converted model. Writes
FOLDER/answer.safetensors with `logits` [S, V] of the prompt and the greedy `tokens` [STEPS].
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
        folder, quantization = job.split("=")
        mode, bits, group = quantization.split(",")
        converted = Path(folder) / "mlx"
        convert(
            folder,
            str(converted),
            quantize=True,
            q_mode=mode,
            q_bits=int(bits),
            q_group_size=int(group),
            dtype="float32",
        )
        model, _ = utils.load_model(converted)
        answer = {"logits": model(prompt[None])[0]}
        if steps:
            tokens = [token for token, _ in generate_step(prompt, model, max_tokens=steps)]
            answer["tokens"] = mx.array(tokens)
        mx.save_safetensors(str(Path(folder) / "answer.safetensors"), answer)


main()
