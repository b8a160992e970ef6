"""SentencePiece tokenizers of GGUF files give the tokens of the library `sentencepiece`."""

import io
import itertools

import gguf
import pytest
import sentencepiece
from executorch_mlx.llm.export.gguf.tokenizer import load_tokenizer

TEXTS = [
    "a",
    " a",
    "  two  spaces ",
    "tab\tand\nline\n\n  end",
    "Ünïcödé ½ ﬁne ＦＵＬＬ",
    "unseen 漢字 🙂",
    "",
    "   ",
    "\u2581literal",
    "the value of the list. " * 3,
]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentences") / "text.txt"
    words = (
        "the",
        "value",
        "list",
        "of",
        "returns",
        "a",
        "new",
        "tuple",
        "fine",
        "spaces",
        "tab",
        "line",
        "two",
        "end",
    )
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 9)) + "." for i in range(400)]
    path.write_text("\n".join(lines))
    return path


def train(sentences, kind, prefix, remove, rule, bytes_):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        input=str(sentences),
        model_writer=model,
        model_type=kind,
        vocab_size=330 if bytes_ else 70,
        byte_fallback=bytes_,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=remove,
        normalization_rule_name=rule,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def write(path, processor, kind, prefix, remove):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(processor.serialized_model_proto())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama" if kind == "bpe" else "t5")
    writer.add_token_list([piece.piece for piece in proto.pieces])
    writer.add_token_scores([piece.score for piece in proto.pieces])
    writer.add_token_types([piece.type for piece in proto.pieces])
    writer.add_unk_token_id(processor.unk_id())
    writer.add_bos_token_id(processor.bos_id())
    writer.add_eos_token_id(processor.eos_id())
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(prefix)
    writer.add_remove_extra_whitespaces(remove)
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        writer.add_precompiled_charsmap(charsmap)
    finish(writer)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_the_tokens_are_those_of_sentencepiece(sentences, kind, rule, tmp_path):
    for prefix, remove, bytes_ in itertools.product((True, False), (True, False), (True, False)):
        if kind == "unigram" and bytes_:
            continue  # this type of GGUF file has no byte tokens
        processor = train(sentences, kind, prefix, remove, rule, bytes_)
        write(tmp_path / "t.gguf", processor, kind, prefix, remove)
        tokenizer, notes = load_tokenizer(tmp_path / "t.gguf")
        assert notes == []
        for text in TEXTS:
            expected = processor.encode(text)
            assert tokenizer(text)["input_ids"] == expected, (prefix, remove, bytes_, text)
            if bytes_ and "\u2581" not in text:
                assert tokenizer.decode(expected) == processor.decode(expected), (prefix, remove, text)


def small_file(path, kind="llama", architecture="llama", **values):
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_tokenizer_model(kind)
    space = "\u0120" if kind == "gpt2" else "\u2581"
    writer.add_token_list(["[unk]", "<s>", "</s>", f"{space}a", "a", space])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1])
    writer.add_token_merges([f"{space} a"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in values.items():
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32}[type(value)]
        add(f"tokenizer.{key.replace('__', '.')}", value)
    finish(writer)
    return load_tokenizer(path)


def test_defaults_and_flags(tmp_path):
    for values, ids in [
        ({}, [1, 5, 3]),
        ({"ggml__add_space_prefix": False}, [1, 3]),
        ({"ggml__remove_extra_whitespaces": True}, [1, 3]),
        ({"ggml__add_bos_token": False, "ggml__add_eos_token": True}, [5, 3, 2]),
        ({"architecture": "gemma"}, [1, 3]),
        ({"architecture": "gemma", "ggml__add_space_prefix": True}, [1, 5, 3]),
        ({"architecture": "phi3"}, [1, 5, 3]),
        ({"kind": "t5"}, [5, 3, 2]),
    ]:
        tokenizer, notes = small_file(tmp_path / "t.gguf", **values)
        assert tokenizer(" a")["input_ids"] == ids and notes == [], values
    tokenizer, _ = small_file(tmp_path / "t.gguf")
    assert tokenizer("a漢")["input_ids"] == [1, 3, 0]  # the unknown token, whatever its text
    assert tokenizer("a</s>a")["input_ids"] == [1, 3, 2, 3]  # the prefix follows a special token, as in llama.cpp


@pytest.mark.parametrize(
    "kind, key, value",
    [
        ("llama", "ggml__add_sep_token", True),
        ("llama", "huggingface__json", "{}"),
        ("gpt2", "ggml__add_space_prefix", True),
        ("gpt2", "ggml__remove_extra_whitespaces", True),
        ("t5", "ggml__unheard_of", 7),
    ],
)
def test_a_key_that_is_not_honoured_is_a_note(kind, key, value, tmp_path):
    _, notes = small_file(tmp_path / "t.gguf", kind, **{key: value})
    assert notes == [f"tokenizer.{key.replace('__', '.')}: ignored: tokens may differ from those in training"]
    off = type(value)(0) if isinstance(value, int) else ""
    assert small_file(tmp_path / "t.gguf", kind, **{key: off})[1] == []
