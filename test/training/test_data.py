"""Training data: which tokens are learned, and how examples become batches."""

import json
import struct
import zlib

import pytest
import small_llm
import torch
from executorch_mlx.training.data import Batches, Example, read_examples
from executorch_mlx.training.optimizer import constant, cosine
from executorch_mlx.training.plot import line_chart

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "critic" -%}{{ raise_exception("no critic") }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}{{ call.function | tojson }}{%- endfor -%}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""


@pytest.fixture(scope="module")
def tokenizer():
    return small_llm.tokenizer(TEMPLATE)


def learned_text(example: Example, tokenizer) -> str:
    return tokenizer.decode([t for t, learned in zip(example.tokens, example.learned) if learned])


def read(tmp_path, tokenizer, *lines, **options):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return read_examples(path, tokenizer, **options)


def message(role, content, **more):
    return {"role": role, "content": content, **more}


def test_answers_of_a_chat_are_learned(tmp_path, tokenizer):
    chat = {
        "messages": [
            message("user", "one"),
            message("assistant", "first", weight=0),
            message("user", "two"),
            message("assistant", "second"),
        ]
    }
    (example,) = read(tmp_path, tokenizer, chat)
    assert learned_text(example, tokenizer).strip() == "second</assistant>"
    (example,) = read(tmp_path, tokenizer, chat, mask_prompt=False)
    assert all(example.learned)


def test_completions_and_text(tmp_path, tokenizer):
    lines = {"prompt": "Say", "completion": " hello"}, {"text": "a text"}
    completion, text = read(tmp_path, small_llm.tokenizer(None), *lines)
    assert learned_text(completion, tokenizer).startswith(" hello")
    assert completion.learned.count(False) >= 1 and text.learned.count(True) >= len(text.tokens) - 1
    (chat, _) = read(tmp_path, tokenizer, *lines)
    assert learned_text(chat, tokenizer).strip() == "hello</assistant>"


@pytest.mark.parametrize(
    "line, expected",
    [
        ({"question": "?"}, "data.jsonl:1: got question, expected messages, prompt and completion, or text"),
        ([1], "data.jsonl:1: got list, expected an object"),
        ({"messages": [message("user", "x")]}, "data.jsonl:1: messages: expected a message of the assistant"),
        ({"messages": "x"}, "data.jsonl:1: messages: got str, expected a list"),
        ({"messages": [{"content": "x"}]}, "data.jsonl:1: role: got NoneType, expected a string"),
        ({"messages": ["x"]}, r"data.jsonl:1: messages\[0\]: got str, expected an object"),
        ({"messages": [message("user", 5)]}, "data.jsonl:1: content: got int, expected a string"),
        (
            {"messages": [message("user", [{"type": "image_url"}])]},
            "data.jsonl:1: text: got NoneType, expected a string",
        ),
        ({"messages": [message("assistant", "", tool_calls=["x"])]}, "tool_calls: expected objects with a function"),
        ({"messages": [message("critic", "x"), message("assistant", "y")]}, "data.jsonl:1: .*rejected them: no critic"),
        ({"prompt": 1, "completion": "x"}, "data.jsonl:1: prompt: got int, expected a string"),
        ({"text": None}, "data.jsonl:1: text: got NoneType, expected a string"),
    ],
)
def test_other_lines_are_errors(tmp_path, tokenizer, line, expected):
    with pytest.raises(ValueError, match=expected):
        read(tmp_path, tokenizer, line)


def test_a_line_that_is_no_text_is_named(tmp_path, tokenizer):
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "x"}\n\xff\n')
    with pytest.raises(ValueError, match="data.jsonl:2: .*can't decode byte"):
        read_examples(tmp_path / "data.jsonl", tokenizer)


def test_calls_and_parts_are_written_as_chats_write_them(tmp_path, tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat = {"messages": [message("user", parts), message("assistant", "three", tool_calls=[call])]}
    (example,) = read(tmp_path, tokenizer, chat)
    text = tokenizer.decode(example.tokens)
    assert "<user>one two</user>" in text and '"arguments": {"a": 1}' in text


def test_text_begins_with_the_special_tokens_of_the_tokenizer(tmp_path, tokenizer):
    from tokenizers.processors import TemplateProcessing

    with_bos = small_llm.tokenizer(TEMPLATE)
    bos = with_bos.convert_ids_to_tokens(small_llm.BOS)
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, small_llm.BOS)])
    text, chat = read(tmp_path, with_bos, {"text": "x"}, {"prompt": "x", "completion": "y"})
    assert text.tokens[0] == small_llm.BOS != chat.tokens[0]


def example(first: int, count: int, learned_from: int = 0) -> Example:
    return Example(tuple(range(first, first + count)), tuple(i >= learned_from for i in range(count)))


def test_targets_follow_the_tokens():
    batch = Batches([example(10, 5, learned_from=3)], 1, 6).at(0)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 0, 0]]
    assert batch.targets.tolist() == [[11, 12, 13, 14, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 0, 0]]
    assert batch.count == 2


def test_long_examples_are_cut_and_those_without_a_target_left_out():
    batches = Batches([example(0, 9), example(0, 9, learned_from=5)], 1, 4)
    assert batches.per_epoch == 1
    assert batches.at(0).targets.tolist() == [[1, 2, 3, 4]]
    with pytest.raises(ValueError, match="something to learn in its first 5 tokens"):
        Batches([example(0, 9, learned_from=5)], 1, 4)


def test_packed_rows_have_whole_examples():
    batches = Batches([example(10, 3), example(20, 4), example(30, 3)], 1, 6, pack=True)
    assert [b.tokens.tolist() for b in batches.all()] == [[[10, 11, 20, 21, 22, 0]], [[30, 31, 0, 0, 0, 0]]]
    assert next(batches.all()).targets.tolist() == [[11, 12, 21, 22, 23, 0]]


def test_every_epoch_has_all_rows_in_another_order():
    batches = Batches([example(10 * i, 3) for i in range(8)], 2, 2, seed=1)
    epochs = [[row[0] for i in range(4) for row in batches.at(4 * e + i).tokens.tolist()] for e in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == [10 * i for i in range(8)]
    assert torch.equal(
        batches.at(5).tokens, Batches(*[[example(10 * i, 3) for i in range(8)], 2, 2], seed=1).at(5).tokens
    )


def test_schedules():
    assert [constant(1.0, 10, 4)(step) for step in (1, 4, 9)] == [0.25, 1.0, 1.0]
    schedule = cosine(1.0, 10, 2, final=0.5)
    assert [round(schedule(step), 6) for step in (1, 2, 6, 10, 11)] == [0.5, 1.0, 0.75, 0.5, 0.5]


def test_a_chart_is_a_png():
    png = line_chart({"loss": [(1, 2.0), (2, 1.0), (3, float("nan"))], "validation": [(2, 1.5)], "empty": []})
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    size = struct.unpack(">I", png[33:37])[0]
    rows = zlib.decompress(png[41 : 41 + size])
    assert len(rows) == height * (1 + 3 * width) and bytes((31, 119, 180)) in rows
    assert line_chart({}).startswith(b"\x89PNG")
