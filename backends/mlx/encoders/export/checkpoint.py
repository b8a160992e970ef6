"""`EncoderFolder`: what a folder with an encoder says about it. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.models.auto import modeling_auto as auto

from ...llm.export.checkpoints.hf import read_json
from ..config import CLASSIFY, EMBED, RERANK

MODULES = "modules.json"  # the file of sentence-transformers that lists the parts of a model
_TRANSFORMERS = ("Transformer", "CLIPModel")
# Models of texts and pictures whose towers have `get_text_features` and `get_image_features`.
TOWERS = ("clip", "siglip", "siglip2", "chinese_clip", "metaclip_2", "altclip")
LOGIT_SCORE = ("LogitScore", "CausalScoreHead")  # parts of sentence-transformers that score by a language model
_CLASSIFIER = "ForSequenceClassification"
# The dtypes of files that an export reads, and the name of what other tasks models have.
_ENCODERS = ("ForMaskedLM", "ForPreTraining", "Model", "ForTextEncoding")


@dataclass
class Part:
    """A part of a model of sentence-transformers after the transformer: the name of its class, and its settings."""

    kind: str
    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class EncoderFolder:
    """A folder with an encoder.

    - `path`: the folder.
    - `transformer`: the folder of the transformer: `path`, or a folder in it.
    - `config`: the content of the transformer's `config.json`.
    - `task`: `embed`, `rerank` or `classify`.
    - `parts`: the parts of sentence-transformers after the transformer, or None for another checkpoint.
    - `text_settings`: those of sentence-transformers about the texts, such as `max_seq_length`.
    - `settings`: those about the whole model, such as `prompts`.
    """

    path: Path
    transformer: Path
    config: dict[str, Any]
    task: str
    parts: list[Part] | None = None
    text_settings: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type"))

    @property
    def has_modules(self) -> bool:
        """Whether the folder is one of sentence-transformers."""
        return (self.path / MODULES).is_file()

    @property
    def judges(self) -> bool:
        """Whether the model is a causal language model that scores documents by the logits of tokens."""
        return any(part.kind in LOGIT_SCORE for part in self.parts or ())

    @property
    def has_towers(self) -> bool:
        """Whether the model has an encoder of texts and one of pictures."""
        return self.model_type in TOWERS


def find_encoder(folder: Path) -> EncoderFolder | None:
    """Return the encoder in `folder`, or None if the folder has another model.

    Raises OSError or ValueError if the files that say so are damaged.
    """
    if (folder / MODULES).is_file():
        return _sentence_transformer(folder)
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    name, kind = _architecture(config), str(config.get("model_type"))
    if name.endswith(_CLASSIFIER):
        return EncoderFolder(folder, folder, config, RERANK if _is_reranker(config) else CLASSIFY)
    is_tower = kind in TOWERS and name.endswith("Model")
    is_causal = name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or not _is_bidirectional(kind)
    if is_tower or (name.endswith(_ENCODERS) and not is_causal):
        return EncoderFolder(folder, folder, config, EMBED)
    return None


def judge(folder: Path) -> EncoderFolder:
    """Return the reranker in `folder`, which has a causal language model that judges with `yes` and `no`.

    Raises OSError or ValueError if it has another model.
    """
    found = find_encoder(folder)
    if found is not None and found.task == RERANK:
        return found
    config = read_json(folder / "config.json")
    if _architecture(config) not in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(f"{folder}: got {_architecture(config) or 'another model'}, expected a causal language model")
    return EncoderFolder(folder, folder, config, RERANK, [Part(LOGIT_SCORE[0], folder)])


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _is_bidirectional(kind: str) -> bool:
    """Whether models of this type are encoders of texts: those with masked tokens in their training."""
    return kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or kind in auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES


def _is_reranker(config: dict[str, Any]) -> bool:
    labels = config.get("id2label")
    count = config.get("num_labels", len(labels) if isinstance(labels, dict) else 2)
    return count == 1


def _sentence_transformer(folder: Path) -> EncoderFolder:
    entries = _read_list(folder / MODULES)
    where = f"export_encoder: model: {folder}: {MODULES}"
    if not entries or _kind(entries[0]) not in _TRANSFORMERS:
        got = _kind(entries[0]) if entries else "no parts"
        raise ValueError(f"{where}: got {got}, expected {' or '.join(_TRANSFORMERS)} first")
    first, *others = entries
    transformer = folder / str(first.get("path", ""))
    parts = []
    for entry in others:
        part = folder / str(entry.get("path", ""))
        settings = read_json(part / "config.json") if (part / "config.json").is_file() and part != folder else {}
        parts.append(Part(_kind(entry), part, settings))
    config = read_json(transformer / "config.json")
    names = [*transformer.glob("sentence_*_config.json")]
    text_settings = read_json(names[0]) if names else {}
    general = folder / "config_sentence_transformers.json"
    settings = read_json(general) if general.is_file() else {}
    task = EMBED
    if any(part.kind in LOGIT_SCORE for part in parts):
        task = RERANK
    elif not parts and _architecture(config).endswith(_CLASSIFIER):
        task = RERANK if _is_reranker(config) else CLASSIFY
    return EncoderFolder(folder, transformer, config, task, parts, text_settings, settings)


def _read_list(path: Path) -> list[dict[str, Any]]:
    import json

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ValueError(f"{path}: got {str(content)[:80]}, expected a list of objects")
    return content


def _kind(entry: dict[str, Any]) -> str:
    """Return the name of the class of a part, without its module, which has moved between versions."""
    return str(entry.get("type", "")).rpartition(".")[2]
