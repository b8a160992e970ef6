"""Encoders that take patches with their places, for pictures of any size: those of Qwen2-VL, Qwen2.5-VL and others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

_WHOLE = 1  # the length of what stands for the sequence lengths where all patches attend to each other


def patch_features(model: PreTrainedModel, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [N, width] of one picture.

    - `patches`: [P, numbers of a patch], in blocks of those that become one embedding.
    - `places`: the row and the column of each patch, int64 [P, 2].

    transformers orders the patches by windows, and attends within each window. The order does not change the result, so
    they stay in their order here, and a mask says which are in one window.
    """
    visual = model.model.visual
    options: dict[str, Any] = {"cu_seqlens": places.new_zeros(_WHOLE), "max_seqlen": 0}
    if (size := getattr(visual, "window_size", None)) is not None:
        unit = visual.spatial_merge_unit
        row, column = (places // (size // visual.patch_size)).unbind(1)
        options["cu_window_seqlens"] = row * (column.max() + 1) + column  # the window of each patch
        options |= {"window_index": torch.arange(patches.shape[0] // unit), "max_window_seqlen": 0}
    with _masked_attention(visual):
        return visual(patches, None, position_ids=places, return_dict=True, **options).pooler_output


def deep_features(model: PreTrainedModel, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what `patch_features` returns, and beside it those features that layers of the decoder add, [N, widths].

    The positions of patches are learned on a grid, and interpolated.
    """
    visual = model.model.visual
    side = visual.num_grid_per_side
    counts = places.max(0).values
    exact = places * ((side - 1) / counts.clamp(min=1))
    low = exact.floor().to(torch.int64).clamp(max=side - 1)
    part = exact - low
    taps = [(low, 1 - part), ((low + 1).clamp(max=side - 1), part)]
    found = [(row * side + column, a * b) for row, a, column, b in _pairs(taps)]
    indices, weights = (torch.stack(values, 1) for values in zip(*found))
    options = {"cu_seqlens": places.new_zeros(_WHOLE), "max_seqlen": 0, "position_ids": places}
    with _masked_attention(visual):
        out = visual(patches, None, interp_indices=indices, interp_weights=weights, return_dict=True, **options)
    return torch.cat([out.pooler_output, *getattr(out, "deepstack_features", ())], -1)


def _pairs(taps: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """Return the row, its weight, the column and its weight for each pair of taps of the two axes."""
    return [(r[:, 0], a[:, 0], c[:, 1], b[:, 1]) for r, a in taps for c, b in taps]


def pixtral_features(model: PreTrainedModel, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [N, width] of one picture, as `patch_features`, of Mistral 3."""
    if model.config.vision_feature_layer != -1:
        raise ValueError(f"vision_feature_layer: got {model.config.vision_feature_layer}, expected -1")
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    x = tower.ln_pre(torch.nn.functional.linear(patches, tower.patch_conv.weight.flatten(1)))[None]
    rotation = tower.patch_positional_embedding(x, places)
    x = tower.transformer(x, attention_mask=None, position_embeddings=rotation, return_dict=True).last_hidden_state
    merger = projector.patch_merger
    x = projector.norm(x[0]).unflatten(0, (-1, merger.spatial_merge_size**2)).mT.flatten(1)
    return projector.linear_2(projector.act(projector.linear_1(merger.merging_layer(x))))


def gemma4_features(model: PreTrainedModel, patches: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [N, width] of one picture, as `patch_features`, of Gemma 4."""
    tower = model.model.vision_tower
    places = places.flip(1)[None]  # the column first
    x = tower.patch_embedder(patches[None], places, torch.zeros_like(places[..., 0], dtype=torch.bool))
    x = tower.encoder(inputs_embeds=x, attention_mask=None, pixel_position_ids=places).last_hidden_state
    blocks = x[0].float().unflatten(0, (-1, tower.config.pooling_kernel_size**2))
    pooled = blocks.mean(1) * tower.config.hidden_size**0.5
    if tower.config.standardize:
        pooled = (pooled - tower.std_bias.float()) * tower.std_scale.float()
    return model.model.embed_vision(pooled.to(x.dtype))


@contextmanager
def _masked_attention(visual: torch.nn.Module) -> Iterator[None]:
    """Within the context, the attention of the blocks takes the window of each patch in place of sequence lengths.

    torch.export cannot trace how transformers splits the sequence.
    """
    layers = [block.attn for block in visual.blocks]
    projection = visual.patch_embed
    embed = projection.forward
    for layer in layers:
        layer.forward = _attention_of(layer)
    projection.forward = lambda patches: _projected(projection, patches)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
        projection.forward = embed


def _projected(projection: torch.nn.Module, patches: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of patches: the convolution has one place for each, so it is a product."""
    weight, bias = projection.proj.weight, projection.proj.bias
    return torch.nn.functional.linear(patches.to(weight.dtype), weight.flatten(1), bias)


def _attention_of(layer: torch.nn.Module) -> Any:
    rotate = sys.modules[type(layer).__module__].apply_rotary_pos_emb_vision

    def forward(hidden_states, cu_seqlens, position_embeddings=None, **options):
        length = hidden_states.shape[0]
        query, key, value = layer.qkv(hidden_states).reshape(length, 3, layer.num_heads, -1).unbind(1)
        query, key = rotate(query, key, *position_embeddings)
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        windows = None if cu_seqlens.shape[0] == _WHOLE else cu_seqlens[:, None] == cu_seqlens
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, windows, scale=layer.scaling)
        return layer.proj(out[0].transpose(0, 1).reshape(length, -1))

    return forward
