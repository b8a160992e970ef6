"""The tokenizer of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import read_gguf_metadata

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_DIGITS = (r"\p{N}", *_GPT2)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# DeepSeek's first models. Of the letters with cases, they know those in the blocks of an older version of Unicode.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\uab68"
    r"\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{1df2a}]]"
)
_CJK = r"[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    r"\s?[!-/:-~！-／：-～\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# Like GPT-4o, but Chinese characters are pieces of their own.
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# The rules that split text before byte pairs are merged, by their names in GGUF → regular expressions, applied one
# after the other. They are those of llama.cpp, or of the tokenizers in transformers that it follows.
_SPLITS = {name: (expression,) for name, expression in GGUF_PRE_TOKENIZER_SPLITS.items()} | {
    **dict.fromkeys(("a.x-4.0", "exaone4", "gpt-2", "granite-docling", "jais", "mellum", "mpt", "olmo"), _GPT2),
    **dict.fromkeys(("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"), _DIGITS),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy-v4", "joyai-llm"), _DEEPSEEK),
    **dict.fromkeys(("chatglm-bpe", "glm4"), (GGUF_PRE_TOKENIZER_SPLITS["llama3"],)),
    **dict.fromkeys(("grok-2", "hunyuan", "solar-open", "stablelm2"), (GGUF_PRE_TOKENIZER_SPLITS["qwen2"],)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "kimi-k2": _KIMI,
    "seed-coder": _SEED,
}
# Rules with which a piece of text that is a token is not divided further, also if no merges lead to this token. Unless
# the file says otherwise, texts then begin with the bos token.
_WHOLE_TOKENS = ("falcon-h1", "falcon3", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0", "pixtral", "tekken")
# Architectures whose vocabulary is that of another one, which transformers knows.
_VOCABULARIES = {"gemma3n": "gemma3"}


def _steps(rule: str) -> list[pre_tokenizers.PreTokenizer]:
    if rule == "falcon":  # splits digits among the characters that stand for bytes, some of which are digits too
        return [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9]{3}"), "isolated"),
        ]
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS.get(rule, _GPT2)]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


# The keys of the metadata after `tokenizer.` that are honoured, or that say nothing about the tokens of a text.
_KNOWN_KEYS = {"chat_template"} | {
    f"ggml.{key}"
    for key in (
        *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges", "add_bos_token"),
        *("add_eos_token", *(f"{kind}_token_id" for kind in ("bos", "eos", "eot", "eom", "unknown", "padding"))),
        *(f"{kind}_token_id" for kind in ("seperator", "cls", "mask", "prefix", "suffix", "middle")),
        *(f"fim_{kind}_token_id" for kind in ("pre", "suf", "mid", "pad", "rep", "sep")),
    )
}
_SPACE = "\u2581"  # a space in the tokens of SentencePiece
# The types of SentencePiece's tokenizers, and the keys that only they honour.
_SENTENCEPIECE = ("llama", "t5", "gemma4")
_SENTENCEPIECE_KEYS = {"ggml.add_space_prefix", "ggml.remove_extra_whitespaces", "ggml.precompiled_charsmap"}


def load_tokenizer(path: Path) -> tuple[PreTrainedTokenizerFast, list[str]]:
    """Return the tokenizer of a file, with its chat template, and notes about keys that are not honoured.

    With an unknown rule, the tokenizer splits text like that of GPT-2.
    """
    architecture, values, settings = get_gguf_tokenizer(str(path))
    architecture = _VOCABULARIES.get(architecture, architecture)
    backend, _ = convert_gguf_tokenizer(architecture, values)
    metadata, _ = read_gguf_metadata(str(path))
    keys = {key.removeprefix("tokenizer."): value for key, value in metadata.items() if key.startswith("tokenizer.")}
    known, notes, kind = _KNOWN_KEYS, [], values.get("tokenizer_type")
    if kind == "gpt2":
        rule = values.get("pre_tokenizer_type", "gpt-2")
        if rule not in (*_SPLITS, "falcon"):
            notes.append(f"tokenizer.ggml.pre: got {rule}, which is unknown: tokens may differ from those in training")
        backend.pre_tokenizer = pre_tokenizers.Sequence(_steps(rule))
        if rule in _WHOLE_TOKENS:
            backend.model.ignore_merges = True
            settings.setdefault("add_bos_token", True)
    elif kind in _SENTENCEPIECE:
        known = known | _SENTENCEPIECE_KEYS
        is_gemma = architecture.startswith("gemma")
        _set_spaces(backend, keys, has_prefix=keys.get("ggml.add_space_prefix", not is_gemma))
        _set_unknown(backend, keys.get("ggml.unknown_token_id"))
        if kind == "t5":
            settings.setdefault("add_eos_token", True)
    ignored = [f"tokenizer.{key}" for key, value in keys.items() if key not in known and value not in (False, 0, "")]
    notes += [f"{key}: ignored: tokens may differ from those in training" for key in sorted(ignored)]
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings), notes


def _set_spaces(backend: Tokenizer, keys: dict[str, Any], *, has_prefix: bool) -> None:
    """Let `backend` treat spaces as SentencePiece does.

    If `has_prefix`, a space is put before each text, also before one that begins with spaces, and before the text after
    a special token.
    """
    steps = []
    if charsmap := keys.get("ggml.precompiled_charsmap"):
        steps.append(normalizers.Precompiled(bytes(byte % 256 for byte in charsmap)))
    if keys.get("ggml.remove_extra_whitespaces"):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if has_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    backend.pre_tokenizer = None
    spaces = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(spaces + ([decoders.Strip(" ", 1, 0)] if has_prefix else []))


def _set_unknown(backend: Tokenizer, token: int | None) -> None:
    """Let `backend` write `token` for what its other tokens do not cover."""
    if token is None:
        return
    if isinstance(backend.model, models.Unigram):
        settings = json.loads(backend.to_str())
        settings["model"]["unk_id"] = token
        backend.model = Tokenizer.from_str(json.dumps(settings)).model
    else:
        backend.model.unk_token = backend.id_to_token(token)
