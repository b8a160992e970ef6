"""The time of a mask of allowed tokens, and the memory of many JSON schemas.

    python benchmarks/grammars.py [--vocab 128000] [--schemas 1000] [--tokens 60]

Compiles different schemas, as the server does for each request, and draws tokens at random from the masks. Needs no
model: the vocabulary consists of all bytes, numbers, punctuation of JSON and random words. Linux only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import string
import time
from types import SimpleNamespace

import numpy
from executorch_mlx.serve.forms import Form
from executorch_mlx.serve.grammar import Grammars

FIELDS = (
    {"type": "string"},
    {"type": "string", "maxLength": 20},
    {"type": "string", "pattern": "^[a-z]{2,9}-[0-9]+$"},
    {"type": "integer"},
    {"type": "number", "minimum": 0},
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
)


def vocabulary(size: int, rng: random.Random) -> list[bytes]:
    tokens = {bytes([byte]) for byte in range(256)} | {str(number).encode() for number in range(1000)}
    tokens |= {text.encode() for text in ('", "', '": "', '": ', '",', '"}', '{"', "}, {", "],", '["', ": [", ", ")}
    while len(tokens) < size:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))
        tokens.add(rng.choice(("", " ", '"')).encode() + word.encode())
    return sorted(tokens)


class Model:
    """What `Grammars` uses of a model. Its last token ends an answer."""

    name, marker_tokens = "random", {}

    def __init__(self, tokens: list[bytes]):
        program = SimpleNamespace(vocab_size=len(tokens) + 1, takes=lambda name: True)
        self.special_tokens = {len(tokens): "</s>"}
        self.llm = SimpleNamespace(eos_ids={len(tokens)}, program=program)
        self.token_bytes = [*tokens, b"</s>"].__getitem__


def schema(number: int, rng: random.Random) -> dict:
    names = [f"field_{number}_{index}" for index in range(12)]
    properties = {name: rng.choice(FIELDS) | {"description": f"{number}"} for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocab", type=int, default=128_000)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=60, help="largest number of tokens of an answer")
    options = parser.parse_args()
    rng = random.Random(0)
    model = Model(vocabulary(options.vocab - 1, rng))
    grammars, body = (
        Grammars(model),
        SimpleNamespace(form=None, ignore_eos=None, min_tokens=None, allowed_token_ids=None, bad_words=None),
    )
    masks, compilations, memory, started = [], [], [], time.perf_counter()
    for number in range(options.schemas + 10):
        body.form = Form("json", schema(number, rng), "response_format")
        before = time.perf_counter()
        allowed, answer = grammars.for_completion(body).allowed_tokens(), []
        compilations.append(time.perf_counter() - before)
        for _ in range(options.tokens):
            before = time.thread_time()
            mask = allowed(answer)
            masks.append(time.thread_time() - before)
            tokens = numpy.flatnonzero(numpy.unpackbits(mask.view(numpy.uint8), bitorder="little"))
            answer.append(int(rng.choice(tokens)))
            if answer[-1] in model.llm.eos_ids:
                break
        memory.append(resident_bytes())
    first, compilations = compilations[0], compilations[10:]  # the first one reads the vocabulary
    print(f"vocabulary {options.vocab}: {first:.1f} s, then for each of {options.schemas} schemas")
    print(f"compile  median {1e3 * statistics.median(compilations):.2f} ms, most {1e3 * max(compilations):.1f} ms")
    hundredths = statistics.quantiles(masks, n=100)
    print(f"mask     median {1e6 * hundredths[49]:.0f} us, 99 % {1e6 * hundredths[98]:.0f} us, {len(masks)} masks")
    print(f"memory   {(memory[-1] - memory[9]) / options.schemas / 1e3:.1f} KB, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
