"""Portable language models answer on ExecuTorch's own MLX delegate as they do here."""

import pytest
import small_llm
import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from loaded_method import LoadedMethod

from interpreter import OFFICIAL, Program

HEAD = HeadConfig(penalties=32)
CHUNK = 32
PROMPT = "Return the first element of a list. " * 4  # longer than the sliding window, and more than one chunk
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "top_k": 400, "min_p": 0.001, "repetition_penalty": 1.1, "seed": 7},
}
COUNT = 64


def answer(program: Program, prompt: list[int], vocabulary: int, **parameters) -> list[int]:
    """Call `forward` as an app does: the prompt in chunks, then each token at the next position."""
    inputs = HEAD.inputs(1, vocabulary) | {"adjusts": torch.tensor(True)}
    inputs |= {name: torch.tensor(value, dtype=inputs[name].dtype) for name, value in parameters.items()}
    first_seed = inputs["seed"]
    tokens, position, pending = [], 0, prompt
    while len(tokens) < COUNT:
        inputs["seed"] = first_seed + len(tokens)
        for start in range(0, len(pending), CHUNK):
            part = pending[start : start + CHUNK]
            token = program.execute("forward", [torch.tensor([part]), torch.tensor([position]), *inputs.values()])[0]
            position += len(part)
        tokens.append(int(token))
        pending = tokens[-1:]
    return tokens


@pytest.mark.parametrize("window", ["auto", 24], ids=["full", "window"])
@pytest.mark.parametrize("quantize", ["none", "int4", "int8"])
def test_demo_model(delegate, tmp_path, quantize, window):
    path = tmp_path / "demo.pte"
    options = {"quantize": quantize, "sliding_window": window, "chunk": CHUNK, "max_context_len": 256}
    exported = export_llm(small_llm.DEMO, portable=True, head=HEAD, verify=False, **options)
    exported.save(path)
    llm = LLM.load(path)
    prompt = llm.tokenizer.encode(PROMPT)
    program = Program(path, OFFICIAL)
    vocabulary = llm.program.vocab_size
    for name, parameters in SETTINGS.items():
        expected = llm.generate(prompt, max_new_tokens=COUNT, ignore_eos=True, **parameters).result().tokens
        assert answer(program, prompt, vocabulary, **parameters) == expected, name


def test_logits(delegate, tmp_path):
    """ExecuTorch's own runner of language models calls `forward` of such a file, and samples on the host."""
    path = small_llm.export(tmp_path / "logits.pte", portable=True, outputs="logits", tokenizer=None)
    here, there = LoadedMethod(path), Program(path, OFFICIAL)
    position = 0
    for tokens in ([5, 17, 200, 3], [77], [8]):
        inputs = [torch.tensor([tokens]), torch.tensor([position])]
        torch.testing.assert_close(here.execute(inputs)[0], there.execute("forward", inputs)[0], rtol=1e-4, atol=1e-4)
        position += len(tokens)
