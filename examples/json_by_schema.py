"""JSON by a schema: a model that knows only docstrings is made to write what the schema asks for.

`xgrammar` says before every token which ones may come next, and the program draws among those:
the mask goes in with the token, no logit comes out.

    .venv/bin/python examples/json_by_schema.py [--schema FILE] [--prompt TEXT] [--seed N]

`make build` installs `xgrammar`; elsewhere it is pip install xgrammar.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # what the wheels have to say about each other is not for this page
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")

import torch  # noqa: E402
import xgrammar  # noqa: E402
from executorch_mlx.llm.export import Sampling, export_llm  # noqa: E402
from executorch_mlx.llm.llm import LLM  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

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
    """The texts that a JSON schema allows, in the tokens of one model."""

    def __init__(self, tokenizer, vocab_size: int, eos_ids: Sequence[int], schema: dict):
        self.vocab_size = vocab_size
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(eos_ids)
        )
        compiler = xgrammar.GrammarCompiler(info)
        self.compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)

    def allowed_tokens(self) -> Callable[[Sequence[int]], torch.Tensor]:
        """What `LLM.generate` asks before every token of one answer: the ids of the answer so
        far in, a bit for each token out. When the JSON is whole, only the end is allowed."""
        matcher = xgrammar.GrammarMatcher(self.compiled)
        mask = xgrammar.allocate_token_bitmask(1, self.vocab_size)
        seen = 0

        def allowed(answer: Sequence[int]) -> torch.Tensor:
            nonlocal seen
            for token in answer[seen:]:
                if not matcher.accept_token(token):
                    raise RuntimeError(f"the answer has token {token}, which was not allowed")
            seen = len(answer)
            matcher.fill_next_token_bitmask(mask)
            return mask

        return allowed


def export(path: Path) -> LLM:
    """The demo model with masks among its inputs, written to `path` and loaded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    export_llm(MODEL, sampling=Sampling(min_p=False, allowed_tokens=True)).save(path)
    return LLM.load(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--prompt", default="Return the")
    parser.add_argument("--schema", type=Path, help="a file with a JSON schema")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "json_by_schema.pte")
    options = parser.parse_args(arguments)

    schema = json.loads(options.schema.read_text()) if options.schema else SCHEMA
    llm = export(options.output)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    grammar = Grammar(tokenizer, llm.program.vocab_size, llm.eos_ids, schema)
    settings = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": options.seed}
    free = llm.generate(options.prompt, max_new_tokens=40, **settings).result()
    print(f"--- without the schema\n{options.prompt}{free.text}")
    forced = llm.generate(options.prompt, allowed_tokens=grammar.allowed_tokens(), **settings).result()
    print(f"--- by the schema\n{forced.text}")
    if forced.finish != "stop":
        raise SystemExit(f"the answer is not whole: it ended by {forced.finish}")


if __name__ == "__main__":
    main()
