"""Constrained decoding: a model trained on docstrings writes JSON that conforms to a schema.

Before each draw, `llguidance` computes a mask of the tokens that may come next. The mask is an input of
the program, which draws one of these tokens. The logits never leave the program.

    .venv/bin/python examples/json_by_schema.py [--schema FILE] [--prompt TEXT] [--seed N]

Needs `llguidance`, which `make build` installs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
from executorch_mlx.llm import LLM
from executorch_mlx.llm.export import HeadConfig, export_llm
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "demo_model"

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z_]{3,16}$"},
        "kind": {"enum": ["function", "class", "module"]},
        "summary": {"type": "string", "pattern": "^[A-Z][a-z ,]{10,60}\\.$"},
        "arguments": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
        "line": {"type": "integer", "minimum": 1, "maximum": 9999},
        "public": {"type": "boolean"},
    },
    "required": ["name", "kind", "summary", "arguments", "line", "public"],
    "additionalProperties": False,
}


class Grammar:
    """A JSON schema, compiled for the tokens of one model."""

    def __init__(self, tokenizer, vocab_size: int, eos_ids: Sequence[int], schema: dict):
        self.vocab_size = vocab_size
        tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_ids))
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        self.matcher = LLMatcher(tokens, grammar)
        if self.matcher.is_error():
            raise ValueError(f"schema: {self.matcher.get_error()}")

    def allowed_tokens(self) -> Callable[[Sequence[int]], numpy.ndarray]:
        """Return the function to pass to `LLM.generate` as `allowed_tokens`. Each answer needs a new one.

        The function takes the token ids of the answer so far, and returns the mask of the next token. When
        the JSON is complete, the mask allows only the stop ids.
        """
        matcher = self.matcher.deep_copy()
        mask = numpy.empty((self.vocab_size + 31) // 32, dtype=numpy.int32)
        seen = 0

        def allowed(answer: Sequence[int]) -> numpy.ndarray:
            nonlocal seen
            for token in answer[seen:]:
                if not matcher.consume_token(token):
                    raise RuntimeError(f"the answer contains token {token}, which the mask does not allow")
            seen = len(answer)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return mask

        return allowed


def export(path: Path) -> LLM:
    """Export the demo model with a mask input to `path`, and load it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    export_llm(MODEL, head=HeadConfig(min_p=False, allowed_tokens=True)).save(path)
    return LLM.load(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--prompt", default="Return the")
    parser.add_argument("--schema", type=Path, help="file with a JSON schema")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "json_by_schema.pte")
    options = parser.parse_args(arguments)

    schema = json.loads(options.schema.read_text()) if options.schema else SCHEMA
    llm = export(options.output)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    grammar = Grammar(tokenizer, llm.program.vocab_size, llm.eos_ids, schema)
    parameters = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": options.seed}
    free = llm.generate(options.prompt, max_new_tokens=40, **parameters).result()
    print(f"--- without the schema\n{options.prompt}{free.text}")
    constrained = llm.generate(options.prompt, allowed_tokens=grammar.allowed_tokens(), **parameters).result()
    print(f"--- with the schema\n{constrained.text}")
    if constrained.finish != "stop":
        raise SystemExit(f"the answer is incomplete: finish reason {constrained.finish}")


if __name__ == "__main__":
    main()
