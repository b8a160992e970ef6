"""Encoders with random weights that export in seconds, as folders of sentence-transformers or of transformers."""

import json
from pathlib import Path

import torch

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(97, 123)), "the", "cat", "sat", "on", "mat", ":"]
WORDS += [f"##{chr(code)}" for code in range(97, 123)]
WORDS += ["yes", "no"]
PAD, CLS, SEP = 0, 2, 3
LONGEST = 40  # tokens of a text
TEXTS = ["the cat sat on the mat", "a", "dog " * 60, "", "query: what is a cat", "x y z " * 7]
PROMPT = "query: "
_SIZES = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 2, "pad_token_id": PAD, "max_position_embeddings": 64, "initializer_range": 0.2}
_DECODER = _SIZES | {"num_key_value_heads": 1, "head_dim": 16, "bos_token_id": CLS, "eos_token_id": SEP}
_ENDS = {"cls_token_id": CLS, "sep_token_id": SEP, "bos_token_id": CLS, "eos_token_id": SEP, "mask_token_id": 4}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# The class of the config of a family, and its values.
FAMILIES = {
    "bert": ("BertConfig", _SIZES),
    "roberta": ("RobertaConfig", _SIZES | {"type_vocab_size": 1}),
    "xlm_roberta": ("XLMRobertaConfig", _SIZES | {"type_vocab_size": 1}),
    "mpnet": ("MPNetConfig", _SIZES),
    "modernbert": ("ModernBertConfig", _SIZES | _ENDS | {"local_attention": 8, "global_attn_every_n_layers": 2}),
    "gemma3": ("Gemma3TextConfig", _DECODER | _SLIDING | {"use_bidirectional_attention": True}),
    "qwen3": ("Qwen3Config", _DECODER),
    "nomic_bert": ("NomicBertConfig", _SIZES),
    "deberta_v2": ("DebertaV2Config", _SIZES | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "t5": (
        "T5Config",
        {"vocab_size": len(WORDS), "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    ),
}
_MODES = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


def config(family: str):
    import transformers

    name, values = FAMILIES[family]
    return getattr(transformers, name)(**values)


def save_tokenizer(folder: Path, types: bool = False) -> None:
    """Write a tokenizer of words and letters. `types`: tell the texts of a pair apart."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordPiece({word: id for id, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if types else "[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * types
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=LONGEST, model_input_names=names, **special
    )
    tokenizer.save_pretrained(folder)


def save(folder: Path, family: str = "bert", labels: int | None = None) -> Path:
    """Write a checkpoint of transformers: an encoder, or one with a head for `labels` classes."""
    import transformers

    torch.manual_seed(0)
    settings = config(family)
    if labels is not None:
        settings.num_labels = labels
        model = transformers.AutoModelForSequenceClassification.from_config(settings)
    elif family == "t5":
        model = transformers.AutoModelForTextEncoding.from_config(settings)
    else:
        model = transformers.AutoModel.from_config(settings)
    model.save_pretrained(folder)
    save_tokenizer(folder, types=family == "bert")
    return folder


def save_sentence_transformer(
    folder: Path, family: str = "bert", modes: tuple[str, ...] = ("mean",), dense: bool = False, normalize: bool = True
) -> Path:
    """Write a checkpoint of sentence-transformers."""
    from safetensors.torch import save_file

    save(folder, family)
    width = 32 * len(modes)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    pooling = {"word_embedding_dimension": 32} | {name: mode in modes for mode, name in _MODES.items()}
    write(folder / "1_Pooling" / "config.json", pooling)
    if dense:
        settings = {"in_features": width, "out_features": 24, "activation_function": "torch.nn.modules.activation.Tanh"}
        write(folder / "2_Dense" / "config.json", settings | {"bias": False})
        save_file({"linear.weight": 0.2 * torch.randn(24, width)}, folder / "2_Dense" / "model.safetensors")
        parts.append(("2_Dense", "Dense"))
    if normalize:
        parts.append(("3_Normalize", "Normalize"))
    entries = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in parts]
    write(folder / "modules.json", entries)
    write(folder / "sentence_bert_config.json", {"max_seq_length": LONGEST, "do_lower_case": False})
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": PROMPT}, "default_prompt_name": None})
    return folder


def write(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def expected(folder: Path, texts: list[str], modes: tuple[str, ...], dense: bool, normalize: bool) -> torch.Tensor:
    """The embeddings by transformers, each text alone."""
    import transformers
    from safetensors.torch import load_file

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    has_decoder = transformers.AutoConfig.from_pretrained(folder).model_type == "t5"
    auto = transformers.AutoModelForTextEncoding if has_decoder else transformers.AutoModel
    model = auto.from_pretrained(folder).eval()
    rows = []
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt").input_ids
        with torch.no_grad():
            hidden = model(input_ids=ids).last_hidden_state[0]
        weights = torch.arange(1, len(hidden) + 1.0)[:, None]
        pooled = {
            "cls": hidden[0],
            "max": hidden.amax(0),
            "mean": hidden.mean(0),
            "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
            "weightedmean": (hidden * weights).sum(0) / weights.sum(),
            "lasttoken": hidden[-1],
        }
        rows.append(torch.cat([pooled[mode] for mode in modes]))
    vectors = torch.stack(rows)
    if dense:
        vectors = (vectors @ load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"].T).tanh()
    return torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors
