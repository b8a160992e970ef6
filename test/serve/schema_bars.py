"""Prints the bars of schemas: whether valid values are admitted, and the memory of many schemas.

`python test/serve/schema_bars.py [PAIRS] [SCHEMAS]`, by default 2,000 and 8,000.
"""

import gc
import random
import sys

from served import resident_bytes
from test_grammars import incomplete, matcher


def compile_distinct(begin: int, end: int) -> None:
    """Compile the schemas with these numbers, and compute a mask with each."""
    for number in range(begin, end):
        name = f"name {number}"
        properties = {name: {"type": "string", "maxLength": number % 40 + 1}, "kind": {"enum": [name, "other"]}}
        schema = {"type": "object", "properties": properties, "required": [name], "additionalProperties": False}
        matcher("json", schema).deep_copy().compute_bitmask()


def growth(count: int) -> int:
    """Return the bytes by which the memory grows while `count` schemas are compiled, after the first ones."""
    compile_distinct(0, 300)
    gc.collect()
    before = resident_bytes()
    compile_distinct(300, 300 + count)
    gc.collect()
    return resident_bytes() - before


if __name__ == "__main__":
    pairs, schemas = (int(sys.argv[i]) if len(sys.argv) > i else default for i, default in ((1, 2000), (2, 8000)))
    wrong = incomplete(random.Random(1), pairs)
    print(f"{pairs} pairs of a schema and a valid value: {len(wrong)} not admitted", *wrong, sep="\n", flush=True)
    print(f"{schemas} distinct schemas: memory grows by {growth(schemas) / 2**20:.1f} MiB")
    sys.exit(bool(wrong))
