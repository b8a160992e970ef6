"""The example of constrained decoding: the demo model writes JSON that conforms to a schema."""

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "json_by_schema.py"
PARAMETERS = {"temperature": 1.0, "top_k": 40, "top_p": 0.95}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("json_by_schema", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def printed(example, tmp_path_factory):
    """The output of the example, and the path of its program."""
    path, out = tmp_path_factory.mktemp("schema") / "model.pte", io.StringIO()
    with contextlib.redirect_stdout(out):
        example.main(["--output", str(path), "--seed", "3"])
    return out.getvalue(), path


@pytest.fixture(scope="module")
def answer(example, printed):
    llm = example.LLM.load(printed[1])
    tokenizer = AutoTokenizer.from_pretrained(example.MODEL)

    def answer(schema, **parameters):
        grammar = example.Grammar(tokenizer, llm.program.vocab_size, llm.eos_ids, schema)
        allowed = grammar.allowed_tokens()
        return llm.generate("Return the", allowed_tokens=allowed, **PARAMETERS | parameters).result()

    return answer


def assert_conforms(text):
    """Assert that `text` conforms to the schema of the example."""
    found = json.loads(text)
    assert list(found) == ["name", "kind", "summary", "arguments", "line", "public"]
    assert re.fullmatch("[a-z_]{3,16}", found["name"])
    assert found["kind"] in ("function", "class", "module")
    assert re.fullmatch(r"[A-Z][a-z ,]{10,60}\.", found["summary"])
    assert len(found["arguments"]) <= 3
    assert all(re.fullmatch("[a-z]{1,8}", a) for a in found["arguments"])
    assert type(found["line"]) is int and 1 <= found["line"] <= 9999
    assert type(found["public"]) is bool


def test_the_example_prints_json(printed):
    free, constrained = printed[0].split("--- with the schema\n")
    assert free.startswith("--- without the schema\nReturn the ") and "{" not in free
    assert_conforms(constrained)


def test_the_answer_to_every_seed_conforms(example, answer):
    texts = set()
    for seed in range(8):
        result = answer(example.SCHEMA, seed=seed, temperature=seed / 4)
        assert result.finish == "stop"
        assert_conforms(result.text)
        texts.add(result.text)
    assert len(texts) == 8
    again = answer(example.SCHEMA, seed=7, temperature=7 / 4)
    assert again.text == result.text


def test_other_schemas(answer):
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
    numbers["items"] |= {"minimum": 10, "maximum": 12}
    for seed in range(4):
        found = json.loads(answer(numbers, seed=seed).text)
        assert len(found) == 2 and set(found) <= {10, 11, 12}
    assert answer({"const": "Nothing else."}).text == '"Nothing else."'
