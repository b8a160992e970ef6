"""Compares answers of small models on the GPU with those on the CPU: states, latent attention, quantized caches,
speech.

    python benchmarks/cuda/families.py export FOLDER [NAME ...]   writes the programs; needs no GPU
    python benchmarks/cuda/families.py FOLDER                     compares the answers, six programs at a time

The models are those of test/llm and test/speech. Each gets four requests, twice: together, with draft tokens where the
program can verify them, and one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROWS, TOKENS, CHUNK, CONTEXT, PROCESSES = 2, 32, 64, 256, 12
PROMPTS = [[(17 * i + 5 * key) % 255 + 1 for i in range(5 + 45 * key)] for key in range(4)]
SETTINGS = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7, "top_k": 20}]
LIMIT = 1e-3  # for the error of a log probability in float32. Programs in `ROUGH` round their numbers.
ROUGH = {"bfloat16": 0.5, "int4": 0.05, "w4a8": 0.3, "kv8": 0.05, "kv4": 0.2}


def models() -> dict:
    """Return name → function that returns a model, and the options of its export."""
    import test_families
    import test_kv_bits
    import test_more_families
    import test_state_families
    import torch

    more = {name: family[:3] for name, family in test_more_families.EXPORTED.items()}

    def state(name, **changes):
        return lambda: test_state_families.random_model(name, **changes)

    def other(name, **changes):
        config, model, family_changes = more[name]
        changes = family_changes | {"max_position_embeddings": CONTEXT} | changes
        if "n_positions" in changes:
            changes["n_positions"] = CONTEXT
        return lambda: test_families.random_model(config, model, changes)

    def in_bfloat16(model):
        return lambda: model().to(torch.bfloat16)

    qwen3 = test_families.FAMILIES["qwen3"]
    wide = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64, "max_position_embeddings": CONTEXT}

    def dense():
        return test_families.random_model(qwen3[0], qwen3[1], qwen3[2] | wide)

    w4a8 = {"quantize": "int4", "activations": "int8", "allow_extensions": True}
    delta = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 128, "head_dim": 64}
    result = {name.replace("_", "-"): (state(name), {}) for name in test_state_families.FAMILIES}
    result |= {name.replace(" ", "-"): (other(name), {}) for name in more}
    result |= {
        "qwen3-5-heads-of-64": (state("qwen3_5", **delta), {"allow_extensions": True}),
        "qwen3-5-bfloat16": (in_bfloat16(state("qwen3_5", **delta)), {"allow_extensions": True}),
        "falcon-h1-bfloat16": (in_bfloat16(state("falcon_h1")), {}),
        "latent-attention-bfloat16": (in_bfloat16(other("latent attention")), {}),
        "sinks-bfloat16": (in_bfloat16(other("sinks")), {}),
        "qwen3-int4": (dense, {"quantize": "int4"}),
        "qwen3-w4a8": (dense, w4a8),
        "qwen3-5-w4a8": (state("qwen3_5", **delta), w4a8),
        "sinks-w4a8": (other("sinks", hidden_size=64), w4a8),
        "llama-kv8": (test_kv_bits.llama, {"kv_bits": 8}),
        "llama-kv4": (test_kv_bits.llama, {"kv_bits": 4, "allow_extensions": True}),
        "mistral-kv8": (test_kv_bits.mistral, {"kv_bits": 8}),
    }
    return result


def export(folder: Path, names: list[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    sys.path += [str(root / "test" / part) for part in (".", "llm")]
    import numpy as np
    import qwen_mtp_checkpoints
    import small_speech
    from executorch_mlx.llm.export import HeadConfig, export_llm
    from executorch_mlx.speech.export import export_speech
    from transformers import WhisperFeatureExtractor

    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "chunk": CHUNK,
        "max_context_len": CONTEXT,
        "batch": ROWS,
        "verify": False,
        "head": HeadConfig(logprobs=1),
    }

    def wanted(name):
        return not names or name in names

    for name, (make, changes) in models().items():
        if wanted(name):
            export_llm(make(), **options | changes).save(folder / f"family-{name}.pte")
            print(name, flush=True)
    with tempfile.TemporaryDirectory() as path:
        for name, scale in (("qwen3_next", 0.005), ("qwen3_5", 1.0)):
            title = f"{name.replace('_', '-')}-mtp"
            if wanted(title):
                checkpoint = qwen_mtp_checkpoints.make(name, Path(path), layer_scale=scale)
                export_llm(checkpoint, **options).save(folder / f"family-{title}.pte")
                print(title, flush=True)
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    speech = {
        "whisper": (small_speech.whisper, {"feature_extractor": extractor}),
        "moonshine": (small_speech.moonshine, {"max_seconds": 2.0}),
        "streaming": (small_speech.moonshine_streaming, {"max_seconds": 1.0}),
    }
    for name, (make, changes) in speech.items():
        if wanted(name):
            export_speech(make(), tokenizer=small_speech.tokenizer(), **changes).save(folder / f"speech-{name}.pte")
            print(name, flush=True)
    np.save(folder / "speech.npy", np.stack([small_speech.noise(16_000, seed) for seed in range(3)]))


def answers(path: Path, device: str) -> None:
    """Print the tokens and log probabilities of all requests as JSON: together, then one after the other."""
    if path.stem.startswith("speech-"):
        import numpy as np
        from executorch_mlx.speech import SpeechModel

        with SpeechModel(path, device=device) as model:
            sounds = np.load(path.parent / "speech.npy")
            results = [model.generate(sound, max_new_tokens=20).result() for sound in sounds]
            print(json.dumps([[[r.tokens, None] for r in results]]))
        return
    from executorch_mlx import LLM

    with LLM.load(path, device=device, reuse_prompts=False) as llm:

        def start(key, draft):
            options = SETTINGS[key // 2] | {"max_new_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, "draft": draft}
            return llm.generate(PROMPTS[key], **options)

        draft = 4 if llm.program.has_verify else 0
        together = [generation.result() for generation in [start(key, draft) for key in range(len(PROMPTS))]]
        alone = [start(key, 0).result() for key in range(len(PROMPTS))]
        print(f"{path.stem}: {llm.stats}", file=sys.stderr)
    print(json.dumps([[[r.tokens, r.logprobs] for r in each] for each in (together, alone)]))


def run(program: Path, device: str) -> list:
    command = [sys.executable, __file__, "--answers", str(program), device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.stem}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(program: Path) -> tuple[str, bool]:
    """Return a line about a program, and whether its answers are right."""
    begin = time.perf_counter()
    try:
        expected = run(program, "cpu")
        begin = time.perf_counter()
        got = run(program, "gpu")
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return str(error), False
    equal = total = 0
    error = 0.0
    for (tokens, logprobs), (right, right_logprobs) in zip(sum(got, []), sum(expected, []), strict=True):
        total += len(right)
        equal += sum(a == b for a, b in zip(tokens, right, strict=False))
        same = next((i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), len(right))
        if logprobs is not None:  # of the tokens before the first that differs
            error = max([error, *(abs(a - b) for a, b in zip(logprobs[:same], right_logprobs[:same], strict=True))])
    limit = next((value for kind, value in ROUGH.items() if kind in program.stem.split("-")), LIMIT)
    is_right = error <= limit and (limit > LIMIT or equal == total)
    seconds = time.perf_counter() - begin
    line = f"{equal} of {total} tokens are those of the CPU, largest error of a log probability {error:.1e}"
    return f"{program.stem}: {line} ({seconds:.0f} s)", is_right


def main() -> None:
    if sys.argv[1] == "export":
        return export(Path(sys.argv[2]), sys.argv[3:])
    if sys.argv[1] == "--answers":
        return answers(Path(sys.argv[2]), sys.argv[3])
    folder = Path(sys.argv[1])
    programs = sorted([*folder.glob("family-*.pte"), *folder.glob("speech-*.pte")])
    all_right = True
    with ThreadPoolExecutor(PROCESSES) as pool:
        for done in as_completed(pool.submit(compare, program) for program in programs):
            line, is_right = done.result()
            print(line if is_right else f"WRONG  {line}", flush=True)
            all_right = all_right and is_right
    assert all_right


if __name__ == "__main__":
    main()
