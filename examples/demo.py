"""End to end: export a small Llama with KV caches and the sampling head, then generate text with
mlx_llm_runner.

    make demo        or        .venv/bin/python examples/demo.py
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import export_llm
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "demo_model"

PARAMETERS = {
    "temperature 0": {"temperature": 0.0},
    "temperature 0.8, top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "temperature 1.5": {"temperature": 1.5},
}


def run(runner: Path, program: Path, prompt: list[int], tokens: int, parameters: dict) -> str:
    """Run mlx_llm_runner and return the text of its answer."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in parameters.items()]
    ids = ",".join(map(str, prompt))
    command = [runner, program, "--prompt-ids", ids, "--max-new-tokens", str(tokens), *flags]
    finished = subprocess.run(command, capture_output=True, check=False)
    if finished.returncode:
        raise SystemExit(finished.stderr.decode())
    return finished.stdout.decode().removesuffix("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--prompt", default="Return the")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=60)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "demo.pte")
    parser.add_argument("--runner", type=Path, default=ROOT / "build" / "mlx_llm_runner")
    options = parser.parse_args()

    print(f"exporting {MODEL.relative_to(ROOT)} ...")
    exported = export_llm(MODEL)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    size = exported.save(options.output)
    print(f"{options.output}: {size / 1e6:.1f} MB, {exported.report}\n")

    prompt = AutoTokenizer.from_pretrained(MODEL)(options.prompt)["input_ids"]
    llm = LLM.load(options.output)
    for title, parameters in PARAMETERS.items():
        parameters = parameters | {"seed": options.seed}
        arguments = (options.runner, options.output, prompt, options.max_new_tokens, parameters)
        text = run(*arguments)
        print(f"--- {title}, seed {options.seed}\n{options.prompt}{text}")
        answer = llm.generate(prompt, max_new_tokens=options.max_new_tokens, **parameters)
        from_python = answer.result().text
        print(f"    the same seed again: {_require_equal(run(*arguments), text)}", end="; ")
        print(f"in Python: {_require_equal(from_python, text)}\n")


def _require_equal(other: str, text: str) -> str:
    if other != text:
        raise SystemExit(f"different text:\n{other}")
    return "the same text"


if __name__ == "__main__":
    main()
