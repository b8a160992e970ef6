"""The torch module that a speech export lowers: the encoder and decoder of a checkpoint, with caches in buffers.

There are two kinds of caches: one for the keys and values of the tokens, and one for the keys and values that
cross-attention computes from the states of the encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from ...export.attention.cache import KVCache, LayerSpec
from ...export.attention.masks import AttentionSpan
from ...export.attention.rope import use_stateless_rotary
from ...export.recurrent import cache_argument
from .families import Family

ATTENTION_NAME = "mlx_speech"


class ProgramModel(torch.nn.Module):
    """An encoder and a decoder that share state in buffers.

    - `encode(samples [1, N]) -> states [1, T, D]` runs the encoder, computes the keys and values of the decoder's
      cross-attention from the states, and writes them to the buffers `cross_key_cache_i` and `cross_value_cache_i`
      `[1, heads, family.max_states(), head size]`.
    - `forward(tokens [1, S], input_pos [1]) -> logits [1, V]` of the last token. It reads what `encode` wrote.
    - `align(tokens [1, S]) -> attention [H, S, T]` of the cross-attention heads `alignment_heads`, pairs of a layer and
      a head. It reads what `encode` wrote too.

    T is the number of encoder states, and D their size. The constructor changes `model` in place. `chunk` is the
    largest S, and `max_context_len` the capacity of the cache of the tokens. `timestamp_begin` is the first of the
    timestamp tokens, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        family: Family,
        *,
        max_context_len: int,
        chunk: int,
        dtype: torch.dtype,
        timestamp_begin: int | None = None,
        alignment_heads: Sequence[tuple[int, int]] = (),
    ):
        super().__init__()
        self.model, self.family, self.dtype, self.timestamp_begin = model, family, dtype, timestamp_begin
        self.alignment_heads = tuple(alignment_heads)
        self.aligned: list[torch.Tensor] | None = None  # within `align`, the attention of the layers so far
        self.max_context_len, self.chunk = max_context_len, min(chunk, max_context_len)
        self.features = family.features()
        layers = model.model.decoder.layers
        shapes = [_key_heads(layer.self_attn) for layer in layers]
        specs = [LayerSpec(f"decoder.layers.{i}", shape, shape, AttentionSpan()) for i, shape in enumerate(shapes)]
        self.cache = KVCache.register_on(
            self, specs, rows=1, capacity=max_context_len, chunk=self.chunk, dtype=self.dtype
        )
        self.cross = Cache(layers=[_CrossLayer(self, i, family.max_states()) for i in range(len(layers))])
        if not family.has_fixed_length:
            self.register_buffer("encoder_length", torch.zeros(1, 1, 1, 1, dtype=torch.int64))
        use_stateless_rotary(model)
        use_program_attention(model, self)

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        states = self.family.encode(self.model, self.features(samples).to(self.dtype))
        attended = self.family.states_for_decoder(self.model, states)
        for layer, cross in zip(self.model.model.decoder.layers, self.cross.layers, strict=True):
            cross.write(layer.encoder_attn, attended)
        if not self.family.has_fixed_length:
            # The number of states varies, so the program computes it as a tensor.
            length = torch.arange(attended.shape[1])[-1:] + 1
            self.encoder_length.copy_(length.reshape(1, 1, 1, 1))
        return states

    def forward(self, tokens: torch.Tensor, input_pos: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device) + input_pos
        caches = EncoderDecoderCache(self.cache.begin_call(tokens.shape[1], input_pos), self.cross)
        caches.is_updated = dict.fromkeys(range(len(self.cross.layers)), True)
        self.cross.mask = None
        if not self.family.has_fixed_length:
            places = torch.arange(self.cross.layers[0].capacity).reshape(1, 1, 1, -1)
            self.cross.mask = places < read_shared_buffer(self, "encoder_length")
        decoder = self.model.model.decoder
        states = decoder(
            input_ids=tokens,
            # The decoder skips cross-attention without these states. It does not read their values: the keys and
            # values are in the cache.
            encoder_hidden_states=torch.zeros(1, 1, self._encoder_size(), dtype=self.dtype),
            position_ids=positions.unsqueeze(0),
            use_cache=True,
            **{cache_argument(decoder): caches},
        ).last_hidden_state
        return self.model.proj_out(states[:, -1])

    def align(self, tokens: torch.Tensor) -> torch.Tensor:
        self.aligned = []
        try:
            self(tokens, torch.zeros(1, dtype=torch.int64))
            return torch.cat(self.aligned)
        finally:
            self.aligned = None

    def record(self, layer: int, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        """Within `align`, keep the attention of the alignment heads in a layer."""
        heads = [head for of_layer, head in self.alignment_heads if of_layer == layer]
        if self.aligned is not None and heads:
            scores = query[0, heads].float() @ key[0, heads].float().mT
            self.aligned.append((scores * scale).softmax(-1))

    def _encoder_size(self) -> int:
        config = self.model.config
        return getattr(config, "encoder_config", config).hidden_size

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @property
    def cache_bytes(self) -> int:
        """The size of the caches in bytes."""
        cross = sum(b.nbytes for name, b in self.named_buffers() if name.startswith("cross_"))
        return self.cache.bytes + cross


class _CrossLayer(CacheLayerMixin):
    """The keys and values of the encoder's states for one layer of the decoder. `capacity` is in states."""

    is_compileable, is_sliding = True, False

    def __init__(self, owner: torch.nn.Module, index: int, capacity: int):
        self.owner, self.capacity = owner, capacity
        self.is_initialized = True
        self.names = (f"cross_key_cache_{index}", f"cross_value_cache_{index}")
        heads, size = _key_heads(owner.model.model.decoder.layers[index].encoder_attn)
        for name in self.names:
            owner.register_buffer(name, torch.zeros(1, heads, capacity, size, dtype=owner.dtype))

    def write(self, attention: torch.nn.Module, states: torch.Tensor) -> None:
        heads, size = _key_heads(attention)
        for name, projection in zip(self.names, (attention.k_proj, attention.v_proj)):
            buffer = getattr(self.owner, name)
            new = projection(states).view(1, -1, heads, size).transpose(1, 2)
            start = torch.zeros(1, dtype=torch.int64)
            buffer.copy_(torch.ops.mlx.cache_update(buffer, new.to(buffer.dtype), start))

    @property
    def keys(self) -> torch.Tensor:
        return read_shared_buffer(self.owner, self.names[0])

    @property
    def values(self) -> torch.Tensor:
        return read_shared_buffer(self.owner, self.names[1])

    # Assignments have no effect: only `encode` writes the keys and values.

    @keys.setter  # type: ignore[attr-defined, no-redef]
    def keys(self, value) -> None:
        pass

    @values.setter  # type: ignore[attr-defined, no-redef]
    def values(self, value) -> None:
        pass

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        raise NotImplementedError("the keys and values of the encoder are computed once, by encode()")

    def get_mask_sizes(self, query_length):
        return self.capacity, 0

    def get_seq_length(self):
        return self.capacity

    def get_max_length(self):
        return self.capacity


def read_shared_buffer(owner: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the contents of a buffer that another method of the program writes.

    The function copies the contents back to the buffer. `torch.export` then treats the buffer as mutable. Otherwise it
    would be a constant of the reading method, and the methods would not share it.
    """
    buffer = getattr(owner, name)
    state = torch.ops.mlx.read_state(buffer)
    buffer.copy_(state)
    return state


def _key_heads(attention: torch.nn.Module) -> tuple[int, int]:
    """Return the number of key heads of an attention module, and their size."""
    return attention.k_proj.weight.shape[0] // attention.head_dim, attention.head_dim


# -- attention ------------------------------------------------------------------------------------


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """An attention function for the attention interface of `transformers`: `[1, H, S, D]` → `[1, S, H, D]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    program_model = module.speech_program_model[0]
    if module.speech_role == "self":
        out = program_model.cache.layers[module.layer_idx].attend(query, scale)
    else:
        is_cross = module.speech_role == "cross"
        if is_cross:
            program_model.record(module.layer_idx, query, key, scale)
        mask = program_model.cross.mask if is_cross else _window_mask(module.speech_window, key.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    return out.transpose(1, 2), None


def _window_mask(window: tuple[int, int] | None, length) -> torch.Tensor | None:
    """Return a bool mask `[T, T]`, or None without a window. T is `length`.

    A state attends to `window[0]` states up to and including itself, and to `window[1] - 1` states after it.
    """
    if window is None:
        return None
    at = torch.arange(length)
    back = at[:, None] - at[None, :]
    return ((back >= 0) & (back < window[0])) | ((back < 0) & (-back < window[1]))


def use_program_attention(model: PreTrainedModel, program_model: ProgramModel) -> None:
    """Change `model` in place: its decoder attends over the caches of `decoder`, and its encoder within windows."""
    for layer, window in zip(model.model.encoder.layers, program_model.family.windows(), strict=True):
        _set_role(layer.self_attn, "encoder", program_model, window)
    for layer in model.model.decoder.layers:
        _set_role(layer.self_attn, "self", program_model)
        _set_role(layer.encoder_attn, "cross", program_model)
    AttentionInterface.register(ATTENTION_NAME, attend)
    model.set_attn_implementation(ATTENTION_NAME)


def _set_role(attention: torch.nn.Module, role: str, program_model: ProgramModel, window=None) -> None:
    """Store in a module of the checkpoint what `attend` reads."""
    attention.speech_role, attention.speech_window = role, window
    attention.speech_program_model = [program_model]  # in a list, because a module would become a submodule
    attention.head_dim_padding = 0  # Moonshine pads the heads for some attention kernels; MLX needs no padding
