"""The table of token bytes."""

from pathlib import Path

import pytest
from executorch_mlx.llm.export.metadata import tokenizer_methods
from executorch_mlx.llm.tokens import token_bytes
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer

MODEL = Path(__file__).parents[2] / "examples" / "demo_model"


def token_table(tokenizer, vocab_size):
    methods = tokenizer_methods(tokenizer, vocab_size)
    return methods["token_bytes"], methods["token_offsets"]


@pytest.mark.parametrize("text", ["Return the value.", "  tabs\tand\nlines", "naïve — 日本語 \U0001f600", "\x00\x7f"])
def test_the_bytes_of_the_tokens_are_those_of_the_text(text):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    data, offsets = token_table(tokenizer, len(tokenizer))
    ids = tokenizer(text)["input_ids"]
    concatenated = b"".join(data[offsets[i] : offsets[i + 1]].numpy().tobytes() for i in ids)
    assert concatenated == text.encode()


def test_special_tokens_and_missing_ids_have_no_bytes():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    _, offsets = token_table(tokenizer, len(tokenizer) + 10)
    assert len(offsets) == len(tokenizer) + 11
    assert offsets[tokenizer.bos_token_id] == offsets[tokenizer.bos_token_id + 1]
    assert offsets[-11] == offsets[-1]


def test_added_tokens_are_decoded_as_by_the_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = ["\n Caf\u00e9", "<d\u00e9j\u00e0 vu>", "\u65e5\u672c\u00e9", "<tool>"]
    tokenizer.add_tokens(texts)
    data, offsets = token_table(tokenizer, len(tokenizer))
    for token, text in enumerate(texts, len(tokenizer) - len(texts)):
        assert data[offsets[token] : offsets[token + 1]].numpy().tobytes() == text.encode()
        assert tokenizer.decode([token]) == text


def test_special_tokens_have_no_bytes_whether_the_config_names_them_or_not():
    """Those that only `tokenizer.json` has are special too, such as `[TOOL_CALLS]` in Mistral's folders."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    token = len(tokenizer) - 1
    _, offsets = token_table(tokenizer, len(tokenizer))
    assert token not in tokenizer.all_special_ids
    assert offsets[token] == offsets[token + 1] and tokenizer.decode([token], skip_special_tokens=True) == ""


LLAMA = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
# Decoder → tokens whose text follows the text "a".
DECODERS = {
    "pieces": (LLAMA, ["\u2581the", "y", "<0xC3>", "<0xA9>", "\u2581", "<0x0A>"]),
    "Metaspace": (decoders.Metaspace(), ["\u2581the", "y", "\u2581"]),
    "another space": (decoders.Metaspace("~"), ["~the", "y\u2581"]),
    "WordPiece": (decoders.WordPiece(), ["the", "##y", "don", "'", "##t", "n't", "##s", ".", "\u4f60", "\u597d"]),
    "WordPiece without cleanup": (decoders.WordPiece(cleanup=False), ["the", "##y", "."]),
    "words with an end": (decoders.BPEDecoder("</w>"), ["the", "y</w>", ".</w>", "x"]),
    "none": (None, ["the", "y", "."]),
}


@pytest.mark.parametrize("name", DECODERS)
def test_bytes_are_those_of_the_decoder(name):
    decoder, tokens = DECODERS[name]
    backend = Tokenizer(models.WordLevel({token: id for id, token in enumerate(["a", *tokens])}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    table = token_bytes(backend, {}, len(tokens) + 1)
    answer = list(range(1, len(tokens) + 1))
    assert "a" + b"".join(table[1:]).decode() == backend.decode([0, *answer])
    assert token_bytes(backend, answer, 2)[1] == b""
