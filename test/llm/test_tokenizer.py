"""`Tokenizer` gives the ids and the text that transformers gives."""

import itertools
import json
import threading
from types import SimpleNamespace

import pytest
import small_llm
from executorch_mlx.llm.export import export_llm
from executorch_mlx.llm.export.checkpoints.tokenizer import load_tokenizer
from executorch_mlx.llm.tokenizer import Tokenizer
from executorch_mlx.llm.tokens import token_bytes
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

TEXTS = [
    "Return the value.",
    "",
    " ",
    "  two  spaces\n\nand\tlines ",
    "naïve — 日本語 \U0001f600\U0001f44d\U0001f3fd",
    "</s><s>x",
    "<|user|>text<|end|>",
    "1234567",
    "don't",
    "\u00a0\ufeffa\r\n",
]
CORPUS = ["Return the value of the first item.", "naïve — 日本語", "def f(x):\n\treturn x", "12 345"] * 3


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<|user|>", "<|end|>"]
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    )
    return backend


def sentencepiece() -> Backend:
    """BPE over pieces with byte fallback, as in Llama 2 and Gemma."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(set("".join(CORPUS)) - set(" 日本語")) + ["\u2581"]
    vocab = {
        token: id for id, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *letters, "\u2581t", "th", "\u2581th"])
    }
    merges = [("\u2581", "t"), ("t", "h"), ("\u2581t", "h")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def with_bos(backend: Backend) -> Backend:
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


def with_plain(backend: Backend, token: str) -> Backend:
    """Return `backend` with a plain token of the vocabulary in place of a special one."""
    files = json.loads(backend.to_str())
    files["added_tokens"] = [added for added in files["added_tokens"] if added["content"] != token]
    return Backend.from_str(json.dumps(files))


CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "TokenizersBackend"}
CASES = {
    "plain": (byte_level, CONFIG),
    "bos in the file": (lambda: with_bos(byte_level()), CONFIG),
    # `add_bos_token` and `add_eos_token` belong to older formats. They have no effect beside a tokenizer.json.
    "bos in the config": (byte_level, CONFIG | {"add_bos_token": True, "add_eos_token": True}),
    "no bos in the config": (lambda: with_bos(byte_level()), CONFIG | {"add_bos_token": False}),
    "added tokens": (
        byte_level,
        CONFIG
        | {
            "pad_token": "<|pad|>",
            "extra_special_tokens": ["<|more|>"],
            "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        },
    ),
    "named tokens": (byte_level, CONFIG | {"image_token": "<|user|>", "extra_special_tokens": {"t_token": "<|t|>"}}),
    "tokens that only the config makes special": (lambda: with_plain(byte_level(), "</s>"), CONFIG),
    "pieces": (sentencepiece, CONFIG | {"unk_token": "<unk>"}),
    "pieces with bos": (lambda: with_bos(sentencepiece()), CONFIG | {"unk_token": "<unk>", "legacy": False}),
}


@pytest.fixture(params=CASES, scope="module")
def folder(request, tmp_path_factory):
    make, config = CASES[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = make()
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    backend.enable_truncation(3)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(folder, special):
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for text in [*TEXTS, "<think>x", "a<|pad|> <|more|>b"]:
        expected = theirs(text, add_special_tokens=special, verbose=False)["input_ids"]
        assert ours.encode(text, special) == expected, text
        assert ours.decode(expected) == theirs.decode(expected, clean_up_tokenization_spaces=False)
        assert ours.decode(expected, True) == theirs.decode(
            expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert ours.eos_token_id == theirs.eos_token_id is not None
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert ours.special_tokens == theirs.special_tokens_map  # the variables of chat templates


def test_named_tokens_keep_their_settings(tmp_path):
    """Naming a token that strips the space beside it changes neither this nor its id."""
    backend = byte_level()
    backend.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG | {"tool_token": "<tool>"}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_folder(tmp_path)
    ids = theirs("x <tool> y")["input_ids"]
    assert len(ids) == 3 and ours.encode("x <tool> y") == ids
    assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True) == "xy"


def test_tokenizer_of_the_demo_model():
    theirs, ours = AutoTokenizer.from_pretrained(small_llm.DEMO), Tokenizer.from_folder(small_llm.DEMO)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text, verbose=False)["input_ids"]
    assert ours.special_tokens["bos_token"] == "<s>" and ours.chat_template is None


def test_other_threads_run_while_a_long_text_is_encoded():
    """Otherwise, all answers of a server would stop while it encodes a prompt."""
    tokenizer, done, turns = Tokenizer.from_folder(small_llm.DEMO), threading.Event(), itertools.count()
    text = "Return the value.\n" * 2**13

    def take_turns():
        while not done.wait(0.001):
            next(turns)

    thread = threading.Thread(target=take_turns)
    thread.start()
    before = next(turns)
    ids = tokenizer.encode(text)
    after = next(turns)
    done.set()
    thread.join()
    assert after - before > 20  # encode_batch_fast: about 100; a method that holds Python's lock: up to 4
    assert ids == tokenizer.backend.encode(text).ids


@pytest.mark.parametrize("text", ["Return the value.", "  tabs\tand\nlines", "naïve — 日本語 \U0001f600", "\x00\x7f"])
def test_token_bytes_are_those_of_the_text(folder, text):
    ours = Tokenizer.from_folder(folder)
    table = token_bytes(ours.backend, ours.special_ids, ours.backend.get_vocab_size() + 5)
    assert table[-5:] == [b""] * 5 and table[ours.eos_token_id] == b""
    data = b"".join(table[token] for token in ours.encode(text))
    begins = " " if ours.backend.normalizer else ""  # SentencePiece puts a space in front
    assert data.decode() == begins + text


def test_chat_template_of_a_folder(tmp_path):
    tokenizer = small_llm.tokenizer("{{ bos_token }}one")
    tokenizer.save_pretrained(tmp_path)  # chat_template.jinja
    assert (tmp_path / "chat_template.jinja").is_file()
    chat = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(tmp_path).chat_text(chat) == "<s>one"
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    for template, text in (("{{ eos_token }}", "</s>"), (named, "three")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        assert Tokenizer.from_folder(tmp_path).chat_text(chat) == text


def test_chats_with_tools_may_have_a_template_of_their_own(tmp_path):
    tokenizer = small_llm.tokenizer({"default": "plain", "tool_use": "{{ tools[0] }}"})
    chat, tools = [{"role": "user", "content": "x"}], {"tools": ["a tool"]}
    tokenizer.save_pretrained(tmp_path / "files")  # chat_template.jinja and additional_chat_templates/tool_use.jinja
    tokenizer.save_pretrained(tmp_path / "list", save_jinja_files=False)  # as in a program
    for folder in ("files", "list"):
        ours = Tokenizer.from_folder(tmp_path / folder)
        assert (ours.chat_text(chat), ours.chat_text(chat, tools)) == ("plain", "a tool"), folder
    one = Tokenizer((tmp_path / "list" / "tokenizer.json").read_text(), {}, "plain")
    assert one.chat_text(chat, tools) == "plain"


def test_chat_template_of_a_processor(tmp_path):
    """Older models for text and images have their template in a file that transformers gives to processors only."""
    small_llm.tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}one"}))
    assert Tokenizer.from_folder(tmp_path).chat_text([{"role": "user", "content": "x"}]) == "<s>one"
    assert load_tokenizer(tmp_path).chat_template == "{{ bos_token }}one"


def test_files_of_gpt2_need_no_settings(tmp_path):
    letters = {chr(code): code - 97 for code in range(97, 123)}
    (tmp_path / "vocab.json").write_text(json.dumps(letters | {"ab": 26}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for loaded in (load_tokenizer(tmp_path), Tokenizer.from_folder(tmp_path)):
        assert loaded.decode(loaded.encode("abc")) == "abc" and loaded.encode("ab") == [26]


def test_a_tokenizer_whose_class_is_in_the_folder_is_read_from_its_file(tmp_path, monkeypatch):
    """transformers would ask whether to run the code."""
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(f"asked {question}"))
    byte_level().save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG | settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode("Return")) == "Return" and loaded.eos_token == "</s>"


def test_a_folder_without_the_file_of_the_tokens_is_refused(tmp_path):
    """transformers makes a tokenizer that has only the special tokens."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for load in (load_tokenizer, Tokenizer.from_folder):
        with pytest.raises(ValueError, match="lacks the file of its tokens, such as tokenizer.json"):
            load(tmp_path)


def test_a_tokenizer_without_a_backend_is_refused():
    with pytest.raises(
        ValueError, match="export_llm: tokenizer: got SimpleNamespace, expected one of the package tokenizers"
    ):
        export_llm(small_llm.DEMO, tokenizer=SimpleNamespace())


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
