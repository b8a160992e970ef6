"""How families of vision-language models encode pictures, and what takes the place of a picture in a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedModel, WhisperFeatureExtractor

from ...speech.export.features import LogMel
from ...vision.preprocess import preprocessor_settings
from ..attention.cache import PictureAttention
from ..checkpoints.checks import CHECKPOINT_ERRORS
from ..checkpoints.hf import read_json
from .patches import deep_features, gemma4_features, patch_features, pixtral_features

_FILES = ("preprocessor_config.json", "processor_config.json")


class NoPictures(ValueError):
    """Raised for a model whose pictures cannot be exported. The message names the module."""


Examples = tuple[tuple[torch.Tensor, ...], Any]


def _pixels(settings: dict[str, Any]) -> Examples:
    return (_random(1, 3, *settings["image"]["output"]),), None


def _patches(settings: dict[str, Any]) -> Examples:
    """Return patches and their places, in blocks of those that become one embedding."""
    edge, merge = settings["patch"], settings["merge"]
    unit, numbers = merge * merge, 3 * settings["frames"] * edge * edge
    blocks = torch.export.Dim("blocks", min=1, max=settings["most"] // (edge * merge) ** 2)
    rows, columns = (index.flatten() for index in torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij"))
    places = torch.stack([rows, columns], 1).repeat_interleave(unit, 0)
    return (_random(len(places), numbers), places), ({0: unit * blocks}, {0: unit * blocks})


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(20))


@dataclass(frozen=True)
class Family:
    """How a family takes pictures.

    - `encode`: `(model, *inputs) -> embeddings [N, width]`.
    - `examples`: `settings -> example inputs, dynamic shapes`. By default, the input is `pixels` [1, 3, H, W].
    - `settings`: `(source) -> settings` of `vision.processor.PictureProcessor`, without those that `picture_settings`
      adds.
    - `attention`: `config -> how the tokens of a picture attend to each other`, or None if they attend as text does.
    - `added_layers`: `config -> the number of layers of the decoder that add features of the encoder`. These are beside
      the embeddings: the width is that of the embedding times one more than this number.
    - `has_rope_offset`: whether the rotary positions of the model have three axes.
    - `features`: `settings -> a module` that computes the first argument of `encode` from the samples of a sound. A
      family with such a module takes sounds in place of pictures.
    - `token_id`: `config -> the id of the token` in whose place an embedding is.
    - `defaults`: those of the image processor, for one that transformers reads only with torchvision.
    - `layer_token`: `config -> the token` for which layers get their own inputs, in place of those of a picture.
    """

    encode: Callable[..., torch.Tensor]
    settings: Callable[[Source], dict[str, Any]]
    attention: Callable[[Any], PictureAttention | None] = lambda config: None
    has_rope_offset: bool = False
    examples: Callable[[dict[str, Any]], Examples] = _pixels
    added_layers: Callable[[Any], int] = lambda config: 0
    layer_token: Callable[[Any], int] = lambda config: config.image_token_id
    features: Callable[[dict[str, Any]], torch.nn.Module] | None = None
    defaults: dict[str, Any] | None = None
    token_id: Callable[[Any], int] = lambda config: config.image_token_id


@dataclass(frozen=True)
class Source:
    """What the settings of a family are read from.

    - `config`: that of the model.
    - `processor`: the settings of the image processor in transformers, with its defaults.
    - `options`: the settings of the processor of pictures and text, as far as the checkpoint has them.
    - `tokenizer`: the tokenizer of transformers.
    - `video`: the settings of the processor of videos, as far as the checkpoint has them.
    """

    config: Any
    processor: dict[str, Any]
    options: dict[str, Any]
    tokenizer: Any
    video: dict[str, Any] | None

    @property
    def size(self) -> int:
        """The edge of the pictures that the model takes."""
        size = self.config.vision_config.image_size
        return size[0] if isinstance(size, (list, tuple)) else size

    def token(self, id: int) -> str:
        return self.tokenizer.convert_ids_to_tokens(id)


def has_pictures(folder: Path) -> bool:
    """Whether a checkpoint has the settings of a processor of pictures."""
    return any((folder / name).is_file() for name in _FILES)


def find_family(model_type: str) -> Family:
    """Return the family of a model. Raises NoPictures if it is not known."""
    if model_type not in FAMILIES:
        raise NoPictures(f"pictures: got a model of kind {model_type}, expected one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def picture_settings(folder: Path, config: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the settings of `vision.processor.PictureProcessor`. Raises NoPictures if they are not supported."""
    family = find_family(config.model_type)
    if tokenizer is None:
        raise NoPictures("pictures: expected a tokenizer")
    kind = AutoImageProcessor if family.features is None else AutoFeatureExtractor
    try:
        if family.defaults is not None:
            processor = family.defaults | _given(folder)
        else:
            processor = json.loads(kind.from_pretrained(folder, trust_remote_code=False).to_json_string())
    except (*CHECKPOINT_ERRORS, OSError, ValueError) as error:
        raise NoPictures(f"pictures: transformers cannot read the processor: {error}") from error
    options = read_json(folder / "processor_config.json") if (folder / "processor_config.json").is_file() else {}
    try:
        settings = family.settings(Source(config, processor, options, tokenizer, _given_for_videos(folder, options)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NoPictures(f"pictures: {config.model_type}: processor: {error}") from error
    token_id = family.token_id(config)
    token = tokenizer.convert_ids_to_tokens(token_id)
    return {"token_id": token_id, "token": token, "placeholder": token} | settings


def _given(folder: Path) -> dict[str, Any]:
    """Return the settings of the image processor that the checkpoint has."""
    path = next(path for name in _FILES if (path := folder / name).is_file())
    settings = read_json(path)
    return {name: value for name, value in settings.get("image_processor", settings).items() if value is not None}


def _given_for_videos(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    path = folder / "video_preprocessor_config.json"
    settings = read_json(path) if path.is_file() else options.get("video_processor", {})
    return {name: value for name, value in settings.items() if value is not None}


def _features(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    features = model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    return torch.cat(list(features), 0) if isinstance(features, (list, tuple)) else features.flatten(0, 1)


def _idefics3_features(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    states = model.model.vision_model(pixel_values=pixels, return_dict=True).last_hidden_state
    return model.model.connector(states).flatten(0, 1)


def _square(settings: dict[str, Any], edge: int) -> dict[str, Any]:
    """Return the settings of `Preprocessor` for squares of `edge` pixels, whatever size the processor has."""
    return preprocessor_settings({**settings, "size": {"height": edge, "width": edge}}, edge)


def _single(source: Source) -> dict[str, Any]:
    return {"kind": "single", "image": preprocessor_settings(source.processor, source.size)}


def _gemma3(source: Source) -> dict[str, Any]:
    if source.processor.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan: got true, expected false")
    begin, end = (source.token(id) for id in (source.config.boi_token_index, source.config.eoi_token_index))
    around = {"placeholder": begin, "before": f"\n\n{begin}", "after": f"{end}\n\n"}
    return _single(source) | around


def _internvl(source: Source) -> dict[str, Any]:
    names = {"before": "start_image_token", "after": "end_image_token"}
    defaults = {"before": "<img>", "after": "</img>"}
    around = {key: getattr(source.tokenizer, name, defaults[key]) for key, name in names.items()}
    settings = source.processor
    tiles = {"least": settings["min_patches"], "most": settings["max_patches"]}
    if not settings.get("crop_to_patches"):
        tiles = {"least": 1, "most": 1}
    video = {"image": _square(settings | source.video, source.size), "placeholder": "<video>"}
    return _single(source) | {"kind": "internvl", "video": video, **tiles, **around}


def _idefics3(source: Source) -> dict[str, Any]:
    settings, edge = source.processor, source.processor["max_image_size"]["longest_edge"]
    if edge != source.size:
        raise ValueError(f"max_image_size: got {edge}, expected {source.size}, as the model takes them")
    return {
        "kind": "idefics3",
        "image": _square(settings, edge),
        "edge": settings["size"]["longest_edge"] if settings.get("do_resize", True) else None,
        "splits": settings.get("do_image_splitting", True),
        "around": "<fake_token_around_image>",
        "whole": "<global-img>",
    }


def _llama4_features(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    states = model.vision_model(pixels, return_dict=True).last_hidden_state
    return model.multi_modal_projector(states).flatten(0, 1)


def _llama4(source: Source) -> dict[str, Any]:
    settings, edge, most = source.processor, source.size, source.processor["max_patches"]
    if settings["size"] != {"height": edge, "width": edge}:
        raise ValueError(f"size: got {settings['size']}, expected edges of {edge}, as the model takes them")
    grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    return {
        "kind": "llama4",
        "image": _square(settings, edge) | {"rounds": True},
        "sizes": [(rows * edge, columns * edge) for rows, columns in grids],
        "enlarges": settings["resize_to_max_canvas"],
        "placeholder": "<|image|>",
    }


def _qwen(source: Source) -> dict[str, Any]:
    settings, edge = source.processor, source.processor["patch_size"]
    return {
        "kind": "qwen",
        "image": _square(settings, edge),  # `Preprocessor` only normalizes
        "patch": edge,
        "frames": settings["temporal_patch_size"],
        "merge": settings["merge_size"],
        "least": settings["size"]["shortest_edge"],
        "most": settings["size"]["longest_edge"],
        "video": _qwen_video(source),
    }


def _qwen_video(source: Source) -> dict[str, Any]:
    """The time of a frame is on a rotary axis, or in the text before it, where all frames share a limit of pixels."""
    vision, token = source.config.vision_config, source.token(source.config.video_token_id)
    has_axis = source.config.model_type in ("qwen2_vl", "qwen2_5_vl")
    least, most = (128 * 28 * 28, 28 * 28 * 768) if has_axis else (128 * 32 * 32, 32 * 32 * 768)
    settings = source.processor | {"size": {"shortest_edge": least, "longest_edge": most}} | source.video
    rate = getattr(vision, "tokens_per_second", None)
    return {
        "image": _square(settings, settings["patch_size"]),
        "least": settings["size"]["shortest_edge"],
        "most": settings["size"]["longest_edge"],
        "token": token,
        "token_id": source.config.video_token_id,
        "placeholder": token if has_axis else f"<|vision_start|>{token}<|vision_end|>",
        "interval": (1 if rate is None else rate) if has_axis else None,
        "has_rate": rate is not None,
        "limits_all": not has_axis,
    }


def _tiled(settings: dict[str, Any]) -> Examples:
    height, width = settings["image"]["output"]
    most = max(rows * columns for rows, columns in settings["sizes"]) // (height * width) + 1
    return (_random(3, 3, height, width),), ({0: torch.export.Dim("tiles", min=2, max=max(most, 4))},)


def _llava_next_features(model: PreTrainedModel, tiles: torch.Tensor) -> torch.Tensor:
    whole, layer = model.model, model.config.vision_feature_layer
    if not isinstance(layer, int):
        raise ValueError(f"vision_feature_layer: got {layer}, expected one layer")
    states = whole.vision_tower(tiles, output_hidden_states=True, return_dict=True).hidden_states[layer]
    states = states[:, 1:] if model.config.vision_feature_select_strategy == "default" else states
    return torch.cat([whole.multi_modal_projector(states).flatten(0, 1), whole.image_newline[None]])


def _llava_next(source: Source) -> dict[str, Any]:
    sizes = source.processor["image_grid_pinpoints"]
    side = source.size // source.config.vision_config.patch_size
    return _single(source) | {"kind": "llava_next", "sizes": sizes, "side": side}


def _mistral3(source: Source) -> dict[str, Any]:
    settings, edge = source.processor, source.config.vision_config.patch_size
    return {
        "kind": "pixtral",
        "image": _square(settings, edge),
        "patch": edge,
        "frames": 1,
        "merge": source.config.spatial_merge_size,
        "longest": settings["size"]["longest_edge"],
        "most": (settings["size"]["longest_edge"] + edge * source.config.spatial_merge_size) ** 2,
        "break": source.options.get("image_break_token", "[IMG_BREAK]"),
        "end": source.options.get("image_end_token", "[IMG_END]"),
    }


def _gemma4(source: Source) -> dict[str, Any]:
    settings, edge, merge = source.processor, source.processor["patch_size"], source.processor["pooling_kernel_size"]
    begin, end = (source.token(id) for id in (source.config.boi_token_id, source.config.eoi_token_id))
    return {
        "kind": "gemma4",
        "image": _square(settings, edge),
        "patch": edge,
        "frames": 1,
        "merge": merge,
        "most": settings["max_soft_tokens"] * (edge * merge) ** 2,
        "before": begin,
        "after": end,
    }


def _gemma4_attention(config: Any) -> PictureAttention | None:
    is_bidirectional = config.get_text_config().use_bidirectional_attention == "vision"
    return PictureAttention.WINDOWS if is_bidirectional else None


def _whisper(source: Source) -> dict[str, Any]:
    settings, encoder = source.processor, source.config.audio_config
    if settings.get("feature_size") != encoder.num_mel_bins or settings.get("dither"):
        raise ValueError(f"got {settings}, expected feature_size {encoder.num_mel_bins} without dither")
    return {
        "kind": "whisper",
        "rate": settings["sampling_rate"],
        "hop": settings["hop_length"],
        "samples": 2 * encoder.max_source_positions * settings["hop_length"],
        "windows": 1,
        "mel": [settings["feature_size"], settings["n_fft"]],
    }


def _audio_flamingo(source: Source) -> dict[str, Any]:
    settings = _whisper(source)
    seconds = source.options.get("max_audio_len", 600)
    return settings | {"windows": seconds * settings["rate"] // settings["samples"]}


def _voxtral(source: Source) -> dict[str, Any]:
    """The features of longer sounds than a window depend on the loudest frame of all windows."""
    return _whisper(source) | {"is_padded": True, "before": "[BEGIN_AUDIO]"}


def _log_mel(settings: dict[str, Any]) -> torch.nn.Module:
    size, length = settings["mel"]
    names = {"sampling_rate": settings["rate"], "hop_length": settings["hop"]}
    return LogMel(WhisperFeatureExtractor(feature_size=size, n_fft=length, **names))


def _samples(settings: dict[str, Any]) -> Examples:
    return (0.1 * _random(1, settings["samples"]), torch.tensor([settings["samples"] // settings["hop"] // 2])), None


def _window(settings: dict[str, Any]) -> Examples:
    return _samples(settings)[0][:1], None


def _voxtral_features(model: PreTrainedModel, features: torch.Tensor) -> torch.Tensor:
    whole = model.model
    states = whole.audio_tower(features, return_dict=True).last_hidden_state
    return whole.multi_modal_projector(states.reshape(-1, model.config.audio_config.intermediate_size))


def _qwen2_audio_features(model: PreTrainedModel, features: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    whole = model.model
    held = torch.arange(features.shape[-1] // 2) < (frames - 1) // 2 + 1  # states that are not of the padding
    states = whole.audio_tower(features, attention_mask=held[None, None, None], return_dict=True).last_hidden_state
    return whole.multi_modal_projector(states)[0]


def _audio_flamingo_features(model: PreTrainedModel, features: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
    whole, held = model.model, (torch.arange(features.shape[-1]) < frames)[None]
    states = whole.audio_tower(features, input_features_mask=held, return_dict=True).last_hidden_state
    return whole.multi_modal_projector(states)[0]


def _tiles_with_places(settings: dict[str, Any]) -> Examples:
    (tiles,), _ = _tiled(settings | {"sizes": [settings["image"]["output"]]})
    count = torch.export.Dim("tiles", min=2, max=settings["most"] + 1)
    places = torch.arange((tiles.shape[-1] // settings["patch"]) ** 2).repeat(len(tiles), 1)
    places[1:, 1::2] = -1
    return (tiles, places), ({0: count}, {0: count})


def _phi4_features(model: PreTrainedModel, tiles: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of all tiles, tile by tile, and behind them those of two separators."""
    embed = model.model.embed_tokens_extend.image_embed
    tower, held = embed.img_processor, (places >= 0)[:, None, None]
    x = tower.embeddings.patch_embedding(tiles).flatten(2).mT
    x = x + tower.embeddings.position_embedding(places.clamp(min=0))
    mask = torch.where(held, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
    layers = tower.encoder.layers
    for layer in layers[: embed.layer_idx if embed.layer_idx >= 0 else len(layers) + 1 + embed.layer_idx]:
        x = layer(x, mask)
    side = tower.embeddings.num_patches_per_side
    x = x.mT.unflatten(-1, (side, side))
    if side % 2:
        x = embed.img_processor_padding(x)
    rows = embed.image_token_compression(x).flatten(2).mT.flatten(0, 1)
    separators = [embed.sub_img_feature_extensor, embed.global_img_feature_extensor]
    rows = torch.cat([rows, *(row.reshape(1, -1) for row in separators)])
    return embed.img_projection_down(torch.nn.functional.gelu(embed.img_projection_up(rows)))


def _phi4(source: Source) -> dict[str, Any]:
    settings, vision = source.processor, source.config.vision_config
    if not source.size == vision.crop_size == settings["size"]["height"] or settings["patch_size"] != vision.patch_size:
        raise ValueError(f"got {settings}, expected a size of {source.size} and patches of {vision.patch_size}")
    image = _square(settings, source.size)
    return {"kind": "phi4", "image": image, "patch": settings["patch_size"], "most": settings["dynamic_hd"]}


def _audio_token(config: Any) -> int:
    return config.audio_token_id


def _deepstack_layers(config: Any) -> int:
    return len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_LLAMA4 = _HALF | {"size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False}
_PHI4 = _HALF | {"size": {"height": 448, "width": 448}, "patch_size": 14, "dynamic_hd": 36}
_QWEN = Family(patch_features, _qwen, has_rope_offset=True, examples=_patches)
_QWEN3 = Family(deep_features, _qwen, has_rope_offset=True, examples=_patches, added_layers=_deepstack_layers)
FAMILIES = {
    "audioflamingo3": Family(
        _audio_flamingo_features, _audio_flamingo, examples=_samples, features=_log_mel, token_id=_audio_token
    ),
    "gemma3": Family(_features, _gemma3, attention=lambda config: PictureAttention.ALL_LAYERS),
    "gemma4": Family(
        gemma4_features,
        _gemma4,
        attention=_gemma4_attention,
        examples=_patches,
        layer_token=lambda config: config.get_text_config().pad_token_id,
    ),
    "idefics3": Family(_idefics3_features, _idefics3),
    "internvl": Family(_features, _internvl),
    "llama4": Family(_llama4_features, _llama4, defaults=_LLAMA4),
    "llava": Family(_features, _single),
    "llava_next": Family(_llava_next_features, _llava_next, examples=_tiled),
    "mistral3": Family(pixtral_features, _mistral3, examples=_patches),
    "phi4_multimodal": Family(
        _phi4_features,
        _phi4,
        examples=_tiles_with_places,
        defaults=_PHI4,
        token_id=lambda config: config.vision_config.image_token_id,
    ),
    "qwen2_5_vl": _QWEN,
    "qwen2_audio": Family(_qwen2_audio_features, _whisper, examples=_samples, features=_log_mel, token_id=_audio_token),
    "qwen2_vl": _QWEN,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": Family(_idefics3_features, _idefics3),
    "voxtral": Family(_voxtral_features, _voxtral, examples=_window, features=_log_mel, token_id=_audio_token),
}
