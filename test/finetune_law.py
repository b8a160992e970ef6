"""Fine-tunes a model with `executorch-mlx finetune`, and compares the adapter in peft with the adapter in a program.

    python benchmarks/smollm2.py FOLDER                 # SmolLM2-135M-Instruct in floats
    python test/finetune_law.py FOLDER [--steps 50] [--length 128] [--quantize int4]

The data is the text of this repository's documentation. The script runs the commands `finetune` and `export`, loads the
adapter in the exported program and in peft, and prints the largest difference of the log probabilities that both give
to the tokens of a text, and to the most likely tokens in their places. It exits with 1 if the difference exceeds 1e-4.
With `--quantize`, it only prints the losses, because peft has no quantized form of the model.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers as hf
from executorch_mlx.llm import LLM
from peft import PeftModel

DOCS = Path(__file__).resolve().parents[1] / "docs"
BAR, TOP = 1e-4, 20


def command(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "executorch_mlx", *map(str, arguments)], check=True)


def losses(adapter: Path) -> list[float]:
    with open(adapter / "training.csv") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def difference(model: Path, adapter: Path, program: Path, text: list[int]) -> float:
    """Return the largest difference of a log probability after the first token of `text`."""
    peft = PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)
    with torch.no_grad():
        expected = peft.eval()(input_ids=torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    with LLM.load(program) as llm:
        (without,) = llm.score(text[:1], [text[1:]])
        llm.load_adapter("trained", adapter)
        (score,) = llm.score(text[:1], [text[1:]], adapter="trained", logprobs=TOP)
    print(f"log probability of the text: {without.logprob:.3f}, with the adapter {score.logprob:.3f}")
    places = [{token: logprob} | dict(top) for token, logprob, top in zip(text[1:], score.logprobs, score.top_logprobs)]
    return max(abs(row[t].item() - p) for row, place in zip(expected, places, strict=True) for t, p in place.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="FOLDER", help="a checkpoint of transformers")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--quantize", default="none")
    options = parser.parse_args()
    text = "".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    with tempfile.TemporaryDirectory() as name:
        data, adapter, program = (Path(name) / part for part in ("data.jsonl", "adapter", "model.pte"))
        parts = (text[at : at + 1500] for at in range(0, 1500 * options.steps, 1500))
        data.write_text("".join(json.dumps({"text": part}) + "\n" for part in parts))
        settings = ["--steps", options.steps, "--length", options.length, "--batch", 1, "--lr", 1e-3]
        command("finetune", options.model, data, "-o", adapter, *settings, "--quantize", options.quantize)
        steps = losses(adapter)
        print(f"loss: {sum(steps[:5]) / 5:.4f} in the first five steps, {sum(steps[-5:]) / 5:.4f} in the last")
        if options.quantize != "none":
            return 0
        head = ["--logprobs", TOP, "--adapters", 1, "--no-verify"]
        command("export", options.model, "-o", program, "--dtype", "float32", "--max-context-len", 1024, *head)
        tokens = hf.AutoTokenizer.from_pretrained(options.model)(text[-20_000:])["input_ids"][: options.length]
        largest = difference(options.model, adapter, program, tokens)
    print(f"log probabilities of {len(tokens) - 1} tokens, and of {TOP} in each place: differ by at most {largest:.1e}")
    return int(largest > BAR)


if __name__ == "__main__":
    sys.exit(main())
