"""Exports a small model of every family with states, and compares 64 greedy tokens of the engine with transformers.

    python test/llm/state_programs.py [FAMILY ...] [--form bfloat16|int4]

This takes minutes, so it is not a part of `make test`. With --form, the weights are bfloat16 or int4: rounding then
changes tokens, and the check of the export compares the program with eager torch instead.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
import time
from pathlib import Path

import torch
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, VerificationError, export_llm
from test_state_families import CHUNK, FAMILIES, STEPS, greedy, prompt_of, random_model

FORMS = {"bfloat16": {"dtype": torch.bfloat16}, "int4": {"quantize": "int4"}}


def outcome(name: str, form: str | None, folder: Path) -> str:
    """Return "ok", or a description of the error or of the difference."""
    model, path = random_model(name), folder / f"{name}.pte"
    options = dict(chunk=CHUNK, head=HeadConfig.minimal(), max_context_len=2 * STEPS)
    try:
        exported = export_llm(copy.deepcopy(model), **options, verify=form is not None, **FORMS.get(form, {}))
        exported.save(path)
    except (ValueError, VerificationError) as error:
        return str(error)
    if exported.report.refused:
        return str(exported.report)
    if form is not None:
        return "ok"
    prompt = prompt_of(1)
    expected = greedy(model, prompt, STEPS)
    answer = LLM.load(path).generate(prompt[0].tolist(), max_new_tokens=STEPS).result().tokens
    path.unlink()
    return "ok" if answer == expected else f"{answer} instead of {expected}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}; by default all")
    parser.add_argument("--form", choices=FORMS)
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.families or FAMILIES:
            started = time.perf_counter()
            result = outcome(name, options.form, Path(folder))
            failed += result != "ok"
            print(f"{name:20} {time.perf_counter() - started:6.1f} s  {result}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
