"""`export_encoder`: an encoder → a `.pte`. docs/embeddings.md describes the file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES

from ...llm.export.checkpoints.checks import CHECKPOINT_ERRORS, check_loaded, shortened
from ...llm.export.checkpoints.open import find_checkpoint
from ...llm.export.checkpoints.tokenizer import load_tokenizer
from ...llm.export.exported import Exported
from ...llm.export.lowering import lower
from ...llm.export.metadata import tokenizer_files
from ...llm.export.quantization.conversion import convert_weights
from ...llm.export.serialize import serialize
from ...llm.export_options import ENCODER, ExportOptions
from ...workarounds.program_caches import forget_programs
from ..config import CLASSIFY, CONFIG, EMBED, IMAGE_METHOD, RERANK, EncoderConfig
from .check import check_program
from .checkpoint import EncoderFolder, find_encoder, judge
from .images import image_settings
from .judges import Judgement, decoder_of, pair_text
from .methods import SHORTEST, Method, text_method
from .modules import Scores, TextEmbedding, TowerImage, TowerText
from .parts import pooling_modes, stages

_MOST_ROWS = 256
_INPUT_VALUES = 1 << 18  # rows times tokens: ExecuTorch keeps memory for the largest input
_IMAGE_ROWS = 16
_READ_PADDING = ("siglip", "siglip2")  # models that were trained on texts padded to one length, without a mask


@dataclass(kw_only=True)
class ExportedEncoder(Exported):
    """The result of `export_encoder`.

    - `program`, `report`: the program, and which nodes were delegated to MLX.
    - `config`: what the program says about itself.
    - `notes`: a line for each thing that the export left out or changed.
    - `check`: the comparison with the eager model, after `save`.
    """

    config: EncoderConfig
    methods: tuple[str, ...]
    notes: tuple[str, ...] = ()
    unquantized: tuple[str, ...] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """What the program says about itself, for people: without long values."""
        fields = {name: value for name, value in vars(self.config).items() if value and not isinstance(value, dict)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


@forget_programs()
def export_encoder(
    model: str | Path | EncoderFolder, *, progress: Callable[[str], Any] = lambda step: None, **options: Any
) -> ExportedEncoder:
    """Export `model`, a checkpoint folder or a hub id, with an encoder.

    - `progress`: called with the name of each long step before it begins.
    - `options`: those fields of `ExportOptions` that an encoder takes.

    Raises ValueError, with the name of the argument in the message.
    """
    settings = ExportOptions.of("export_encoder", ENCODER, options)
    encoder = model if isinstance(model, EncoderFolder) else _find(model, settings.rerank)
    progress("load")
    loaded = _load(encoder)
    tokenizer = _tokenizer(encoder)
    if encoder.judges:
        loaded = decoder_of(encoder, loaded, tokenizer)
    dtype = settings.torch_dtype or torch.float32
    conversion = convert_weights(
        loaded, settings.quantize, settings.group_size, dtype, tokenizer=None, calibrate=None, progress=progress
    )
    methods, config = _methods(encoder, loaded, tokenizer, dtype, settings.max_context_len)
    progress("export")
    programs = {method.name: method.export() for method in methods}
    constants: dict[str, Any] = {CONFIG: _bytes(config.to_json()), "get_vocab_size": _vocabulary(loaded)}
    if tokenizer is not None:
        constants |= tokenizer_files(tokenizer)
    progress("lower")
    lowered, report = lower(
        programs,
        constants,
        allow_extensions=settings.allow_extensions,
        portable=settings.portable,
        weights=settings.weights_file,
    )
    progress("serialize")
    program = serialize(lowered)
    checker = (lambda path: check_program(path, methods)) if settings.verify else None
    return ExportedEncoder(
        program=program,
        report=report,
        config=config,
        methods=tuple(programs),
        unquantized=tuple(conversion.unquantized),
        _checker=checker,
    )


def _methods(
    encoder: EncoderFolder, model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype, longest: int | None
) -> tuple[list[Method], EncoderConfig]:
    fields: dict[str, Any] = {"task": encoder.task, "model_type": encoder.model_type, "pad": _pad(model, tokenizer)}
    methods, module = [], _text_module(encoder, model, tokenizer, dtype, fields)
    if module is not None:
        length = _max_length(encoder, model, tokenizer, longest)
        rows = max(1, min(_MOST_ROWS, _INPUT_VALUES // length))
        fixed = encoder.model_type in _READ_PADDING
        method = text_method(module, _vocabulary(model), length, rows, fixed, fields.get("types", False))
        methods.append(method)
        fields |= {"max_length": length, "max_rows": rows, "fixed_length": fixed}
        fields["lowercase"] = bool(encoder.text_settings.get("do_lower_case", False))
    if encoder.has_towers:
        fields["images"] = image_settings(encoder, model)
        height, width = fields["images"]["output"]
        pixels = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
        methods.append(Method(IMAGE_METHOD, TowerImage(model).eval(), (pixels,), ({0: ("rows", _IMAGE_ROWS)},)))
        fields["max_rows"] = min(fields.get("max_rows", _IMAGE_ROWS), _IMAGE_ROWS)
    with torch.no_grad():
        fields["size"] = methods[0].module(*methods[0].inputs).shape[1]
    return methods, EncoderConfig(**fields)


def _text_module(
    encoder: EncoderFolder, model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype, fields: dict[str, Any]
) -> torch.nn.Module | None:
    """Return the module that encodes texts, and add to `fields` what it does."""
    if encoder.has_towers:
        fields["normalizes"] = True
        return TowerText(model).eval()
    if encoder.task == EMBED:
        modes = pooling_modes(encoder)
        after, normalizes = stages(encoder, dtype)
        prompts = {name: text or "" for name, text in (encoder.settings.get("prompts") or {}).items()}
        default = encoder.settings.get("default_prompt_name")
        fields |= {
            "pooling": ", ".join(modes),
            "normalizes": normalizes,
            "sizes": _matryoshka(encoder),
            "prompts": prompts,
            "default_prompt": default if default in prompts else None,
        }
        return TextEmbedding(model, modes, after).eval()
    if encoder.task == RERANK:
        fields["pair"] = pair_text(encoder, tokenizer)
    if encoder.judges:
        fields["activation"] = _activation(encoder, "sigmoid")
        return Judgement(model).eval()
    types = getattr(model.config, "type_vocab_size", 0) > 1
    fields["types"] = types
    fields["activation"] = "sigmoid" if encoder.task == RERANK else "softmax"
    if encoder.task == RERANK:
        fields["activation"] = _activation(encoder, fields["activation"])
    if encoder.task == CLASSIFY:
        labels = model.config.id2label
        fields["labels"] = [labels[index] for index in range(len(labels))]
        if getattr(model.config, "problem_type", None) == "multi_label_classification":
            fields["activation"] = "sigmoid"
    return Scores(model, types).eval()


# Checkpoints ---------------------------------------------------------------------------


def _find(model: str | Path, reranks: bool) -> EncoderFolder:
    try:
        path = find_checkpoint(model)
        encoder = judge(path) if reranks else find_encoder(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"export_encoder: model: {error}") from error
    if encoder is None:
        raise ValueError(f"export_encoder: model: {model}: got another model, expected an encoder")
    return encoder


def _load(encoder: EncoderFolder) -> PreTrainedModel:
    """Return the transformer. Raises ValueError for missing or mismatched tensors."""
    where = f"export_encoder: model: {encoder.transformer}"
    kind = AutoModelForSequenceClassification
    if encoder.task == EMBED:
        is_part = encoder.model_type in MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES  # of a model with a decoder, such as T5
        kind = AutoModelForTextEncoding if is_part else AutoModel
    elif encoder.judges:
        kind = AutoModelForCausalLM
    try:
        model, info = kind.from_pretrained(
            encoder.transformer,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except (*CHECKPOINT_ERRORS, SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{where}: transformers cannot load the checkpoint: {shortened([str(error)])}") from error
    if encoder.task == EMBED and not encoder.has_towers:  # the pooler is not used
        info["missing_keys"] = [name for name in info["missing_keys"] if not name.startswith("pooler.")]
    check_loaded(model, info, where)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.eval().requires_grad_(False)


def _tokenizer(encoder: EncoderFolder) -> Any:
    for folder in dict.fromkeys((encoder.transformer, encoder.path)):
        if (tokenizer := load_tokenizer(folder)) is not None:
            return tokenizer
    raise ValueError(f"export_encoder: model: {encoder.path}: got no tokenizer, expected a tokenizer.json")


def _max_length(encoder: EncoderFolder, model: PreTrainedModel, tokenizer: Any, longest: int | None) -> int:
    """Return the largest number of tokens of a text. Raises ValueError if the model does not take `longest`."""
    config = getattr(model.config, "text_config", None) or model.config
    limit = getattr(config, "max_position_embeddings", None) or 8192
    embeddings = next((m for n, m in model.named_modules() if n.endswith("position_embeddings")), None)
    if isinstance(embeddings, torch.nn.Embedding) and embeddings.padding_idx is not None:
        limit = embeddings.num_embeddings - embeddings.padding_idx - 1  # positions begin after that of the padding
    limit = max(SHORTEST, limit)
    if longest is not None:
        if not SHORTEST <= longest <= limit:
            raise ValueError(f"export_encoder: max_context_len: got {longest}, expected {SHORTEST} to {limit}")
        return longest
    given = (encoder.text_settings.get("max_seq_length"), getattr(tokenizer, "model_max_length", None))
    return max(SHORTEST, min(limit, next((n for n in given if isinstance(n, int)), limit)))


def _pad(model: PreTrainedModel, tokenizer: Any) -> int:
    for value in (getattr(tokenizer, "pad_token_id", None), getattr(model.config, "pad_token_id", None)):
        if isinstance(value, int) and value >= 0:
            return value
    return 0


def _vocabulary(model: PreTrainedModel) -> int:
    text = getattr(model.config, "text_config", None) or model.config
    return text.vocab_size


def _matryoshka(encoder: EncoderFolder) -> Sequence[int]:
    """Return the sizes for which the model was trained, as far as the checkpoint says them, in descending order."""
    for name in ("matryoshka_dims", "matryoshka_dimensions"):
        sizes = encoder.config.get(name) or encoder.settings.get(name)
        if isinstance(sizes, list) and all(isinstance(size, int) and size > 0 for size in sizes):
            return sorted(sizes, reverse=True)
    return ()


def _activation(encoder: EncoderFolder, default: str) -> str:
    """Return what a reranker of sentence-transformers applies to its score."""
    settings = encoder.config.get("sentence_transformers")
    given = settings.get("activation_fn") if isinstance(settings, dict) else None
    given = given or encoder.settings.get("activation_fn") or encoder.config.get("sbert_ce_default_activation_function")
    names = {"Sigmoid": "sigmoid", "Identity": "identity"}
    return names.get(str(given).rpartition(".")[2], default) if given else default


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
