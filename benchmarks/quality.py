"""Compares how the quantizations change the answers of a model.

    python benchmarks/quality.py FILE.gguf [--choices int4 mixed] [--calibrate FILE] [--device cuda]

The float model has the dequantized weights of the GGUF file. The columns of the table:

- `MB`: the size of the weights.
- `perplexity`: over 2,000 tokens of the docstrings of the standard library. The line `float32` has the absolute value.
  All other lines have the ratio to it.
- `equal`: the number of questions to which the quantized model gives the same first sentence as the float model, at
  temperature 0.
- `tokens/s`: with `--speed`, the decode speed of the exported model.

PyTorch computes perplexity and answers with the dequantized weights.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import re
import tempfile
import time
from pathlib import Path

import torch

CHOICES = ("int8", "int4", "int4, groups of 64", "mixed", "nvfp4", "mxfp4", "mxfp8")
TOKENS = 2000
MODULES = (
    "argparse asyncio bisect calendar collections contextlib csv datetime decimal difflib fractions functools heapq "
    "inspect itertools json logging pathlib random re shutil socket statistics string subprocess tempfile textwrap "
    "threading unittest urllib.parse"
).split()
QUESTIONS = """What is the capital of France?
What is the capital of Germany?
What is the capital of Japan?
What is the capital of Italy?
What is the capital of Spain?
What is the largest planet in the solar system?
What is the largest ocean on Earth?
What is the chemical symbol for water?
What is the chemical symbol for gold?
How many days are in a week?
How many continents are there?
Who wrote Romeo and Juliet?
Who painted the Mona Lisa?
What is the boiling point of water in degrees Celsius?
What planet is known as the Red Planet?
What is the tallest mountain in the world?
What is the longest river in Africa?
What language is spoken in Brazil?
What gas do plants absorb from the air?
What is the currency of Japan?
How many legs does a spider have?
What is the square root of 64?
What is the opposite of hot?
What is 2 plus 2?
In which country is the Eiffel Tower?
Which animal is known as the king of the jungle?
What is the freezing point of water in degrees Celsius?
What is the main ingredient of bread?
What is the name of Earth's natural satellite?
Who was the first president of the United States?""".splitlines()


def docstrings() -> str:
    """Return the longer docstrings of the public functions and classes that `MODULES` define, as one text."""
    parts = []
    for name in MODULES:
        for key, value in sorted(vars(importlib.import_module(name)).items()):
            if key.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            text = inspect.getdoc(value)
            if value.__module__.split(".")[0] == name.split(".")[0] and text and len(text) > 200:
                parts.append(text)
    return "\n\n".join(parts)


def unpack(model: torch.nn.Module) -> torch.nn.Module:
    """Replace the packed layers of `model` by layers with their dequantized weights, and return `model`."""
    from executorch_mlx.llm.export.packed import MLXEmbedding, MLXLinear

    for path, module in list(model.named_modules()):
        if isinstance(module, MLXEmbedding):
            layer = torch.nn.Embedding.from_pretrained(module.dequantized())
        elif isinstance(module, MLXLinear):
            layer = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            layer.weight = torch.nn.Parameter(module.dequantized() * (module.factor or 1), requires_grad=False)
            layer.bias = module.bias
        else:
            continue
        model.set_submodule(path, layer)
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@torch.no_grad()
def perplexity(model, tokens: torch.Tensor) -> float:
    logits = model(tokens[None]).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, tokens[1:]).exp())


@torch.no_grad()
def first_sentences(model, tokenizer, device: str) -> list[str]:
    sentences = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = ids["input_ids"].to(device)
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        text = tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)
        sentences.append(re.split(r"(?<=[.!?])\s|\n", text.strip())[0])
    return sentences


def decode_speed(model, tokenizer) -> float:
    """Return the tokens per second of the exported model, the best of three answers."""
    from executorch_mlx.llm import LLM
    from executorch_mlx.llm.export import export_llm

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        export_llm(model, tokenizer=tokenizer, dtype=torch.float32, max_context_len=512, verify=False).save(path)
        llm = LLM.load(path)
        speeds = []
        for _ in range(3):
            tokens = iter(llm.generate("Once upon a time", max_new_tokens=65))
            next(tokens)
            started = time.perf_counter()
            speeds.append(sum(1 for _ in tokens) / (time.perf_counter() - started))
    return max(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--calibrate", type=Path, help="text file, as in `executorch-mlx export --calibrate`")
    parser.add_argument("--device", default="cpu", help="where PyTorch computes perplexity and answers")
    parser.add_argument("--speed", action="store_true", help="export each model and measure its decode speed")
    parser.add_argument("--no-answers", action="store_true", help="leave out the column `equal`")
    options = parser.parse_args()

    from executorch_mlx.llm.export.checkpoints.gguf import GGUFCheckpoint
    from executorch_mlx.llm.export.quantization.conversion import convert_weights

    file = GGUFCheckpoint(options.file)
    tokenizer, float_model = file.tokenizer(), unpack(file.load())
    tokens = torch.tensor(tokenizer(docstrings())["input_ids"][:TOKENS])
    evaluated = copy.deepcopy(float_model).to(options.device)
    base = perplexity(evaluated, tokens.to(options.device))
    expected = None if options.no_answers else first_sentences(evaluated, tokenizer, options.device)
    print(f"{'':20} {'MB':>6} {'perplexity':>10} {'equal':>6} {'tokens/s':>9}")
    print(f"{'float32':20} {weight_bytes(float_model) / 1e6:6.1f} {base:10.3f}", flush=True)
    for choice in options.choices:
        name, _, grouped = choice.partition(",")
        model = copy.deepcopy(float_model)
        convert_weights(
            model,
            name,
            64 if grouped else None,
            torch.float32,
            tokenizer=tokenizer,
            calibrate=options.calibrate,
            progress=lambda _: None,
        )
        size, packed = weight_bytes(model), copy.deepcopy(model) if options.speed else None
        evaluated = unpack(model).to(options.device)
        ratio = perplexity(evaluated, tokens.to(options.device)) / base
        line = f"{choice:20} {size / 1e6:6.1f} {ratio:10.4f}"
        if expected is not None:
            answers = first_sentences(evaluated, tokenizer, options.device)
            line += f" {sum(a == b for a, b in zip(answers, expected)):3}/{len(QUESTIONS)}"
        if packed is not None:
            line += f" {decode_speed(packed, tokenizer):9.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
