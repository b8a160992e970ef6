"""New forward methods for recurrent modules of `transformers`. They keep the state in a `StateCache`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ....custom_kernel_ops.recurrence import diagonal_recurrence, gated_linear_attention
from .kernels import begin_recurrence, causal_conv, recur


class TokensAsRows(torch.nn.Module):
    """Stands for a linear layer in code that multiplies its weight by a matrix whose columns are tokens: `weight @ x`.

    The product is that of the layer, which has the tokens as rows. So a token gets the same bits alone as among others.
    The code adds `bias` itself.
    """

    def __init__(self, linear: torch.nn.Module):
        super().__init__()
        self.linear, self.bias = linear, linear.bias
        linear.bias = None

    @property
    def weight(self) -> TokensAsRows:
        return self

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mT).mT


def use_cached_states(model: torch.nn.Module) -> None:
    """Change `model` in place: modules of a class in `FORWARDS` read and write their state in the cache of a call."""
    for path, module in list(model.named_modules()):
        if type(module).__name__ in MAMBA_MIXERS and not isinstance(module.dt_proj, TokensAsRows):
            module.dt_proj = TokensAsRows(module.dt_proj)
        if type(module).__name__ == "Qwen4ExpTextPLELayer" and not isinstance(module.conv1d, DilatedConv):
            module.conv1d = DilatedConv(module.conv1d)
        forward = FORWARDS.get(type(module).__name__)
        if forward is not None:
            module.layer_idx = next(int(part) for part in path.split(".") if part.isdigit())
            module.forward = MethodType(forward, module)


def cache_of(arguments: dict) -> Any:
    """Return the cache among the keyword arguments of a module. Before transformers 5.24 it is `past_key_values`."""
    return arguments["cache"] if "cache" in arguments else arguments["past_key_values"]


def lightning_attention(self, hidden_states, position_embeddings, attention_mask, **kwargs):
    """The forward method of `MiniMaxLightningAttention`. The state of a head decays at a constant rate."""
    cache, (batch, length, _) = cache_of(kwargs), hidden_states.shape
    heads, size = self.num_attention_heads, self.head_dim
    states = self.act_fn(self.qkv_proj(hidden_states)).reshape(batch, length, heads, 3 * size)
    query, key, value = (x.transpose(1, 2).float() for x in torch.split(states, size, dim=3))
    cache.get_recurrent_state(self.layer_idx)
    state = begin_recurrence(cache, cache.current[1], (batch, heads, size, size))
    log_decay = (-self.slope_rate.float().reshape(1, heads, 1)).expand(batch, heads, length)
    out, state = recur(cache, gated_linear_attention, (query, key, value, log_decay), state)
    cache.update_recurrent_state(state, self.layer_idx)
    out = self.norm(out.transpose(1, 2).reshape(batch, length, heads * size).to(hidden_states.dtype))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None


def gated_linear_recurrence(self, input_states, position_ids, attention_mask, use_cache=True, **kwargs):
    """The forward method of `RecurrentGemmaRecurrentBlock`."""
    cache, length = cache_of(kwargs), input_states.shape[1]
    gate = self.act_fn(self.linear_y(input_states))
    x = self.linear_x(input_states).transpose(1, 2)
    joined = cache.update_conv_state(x, self.layer_idx, conv_kernel_size=self.conv1d_width)
    x = causal_conv(joined, self.conv_1d.weight[:, 0], self.conv_1d.bias, None)[..., -length:].transpose(1, 2)
    cache.get_recurrent_state(self.layer_idx)

    def scan(hidden_states, recurrent_gate, reset, recurrent_states):
        initial = begin_recurrence(cache, cache.current[1], (hidden_states.shape[0], hidden_states.shape[2]))
        decay = recurrent_gate * ~reset
        out, last = recur(cache, diagonal_recurrence, (hidden_states.float(), decay.float()), initial)
        return out.to(hidden_states.dtype), last

    self.rg_lru._rnn_scan = scan
    x = self.rg_lru(x, position_ids)
    last, self.rg_lru.recurrent_states = self.rg_lru.recurrent_states, None
    cache.update_recurrent_state(last, self.layer_idx)
    return self.linear_out(x * gate), None


def convolved_projections(self, hidden_states, cache, conv_mask=None):
    """The forward method of `ZayaCCAProjection`. Returns queries, keys and values `[B, S, H, D]`.

    The queries and keys pass two convolutions, the second of which mixes the channels of a head. One half of each value
    is that of the token before. The cache keeps the inputs of the convolutions, and the last hidden state.
    """
    (batch, length, _), size = hidden_states.shape, self.head_dim
    heads, groups = self.num_attention_heads, self.num_key_value_heads
    query, key = self.q_proj(hidden_states), self.k_proj(hidden_states)
    x = torch.cat([query, key], -1).transpose(1, 2)
    x = cache.update_conv_state(x, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
    x = causal_conv(x, self.conv_qk_depthwise.weight[:, 0], self.conv_qk_depthwise.bias, None)
    x = _grouped_conv(x, self.conv_qk_grouped)[:, :, -length:].transpose(1, 2)
    query, key = (y.reshape(batch, length, -1, size) for y in (query, key))
    query = (query + key.repeat_interleave(heads // groups, 2)) * 0.5
    key = query.reshape(batch, length, groups, heads // groups, size).mean(3)
    query, key = (a + b for a, b in zip(x.split([heads, groups], 2), (query, key)))
    hidden = cache.update_conv_state(hidden_states.transpose(1, 2), self.layer_idx, 1, conv_kernel_size=1)
    earlier = hidden.transpose(1, 2)[:, -length - 1 : -1]
    value = torch.cat([self.v_proj_current(hidden_states), self.v_proj_delayed(earlier)], -1)
    return query, key, value.reshape(batch, length, groups, size)


def _grouped_conv(x: torch.Tensor, conv: torch.nn.Conv1d) -> torch.Tensor:
    """Return the causal convolution `[B, H, S, D]` of `x` `[B, H * D, S]` by `conv`, whose H groups have D channels.

    Products of the tokens with matrices give a token the same bits alone as among others.
    """
    batch, channels, length = x.shape
    heads, taps = conv.groups, conv.kernel_size[0]
    x = x.reshape(batch, heads, channels // heads, length).mT
    padded = torch.nn.functional.pad(x, (0, 0, taps - 1, 0))
    windows = torch.cat([padded[:, :, tap : tap + length] for tap in range(taps)], -1)
    weight = conv.weight.reshape(heads, channels // heads, channels // heads, taps).permute(0, 3, 2, 1).flatten(1, 2)
    return windows @ weight + conv.bias.reshape(heads, 1, -1)


class DilatedConv(torch.nn.Module):
    """Stands for `conv`, a convolution of each channel with a dilation and without padding.

    It adds the taps in a fixed order, so that a token gets the same bits alone as among others.
    """

    def __init__(self, conv: torch.nn.Conv1d):
        super().__init__()
        self.weight, self.dilation = conv.weight, conv.dilation[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taps = self.weight.shape[2]
        length = x.shape[2] - (taps - 1) * self.dilation
        parts = [x.narrow(2, tap * self.dilation, length) * self.weight[:, :, tap] for tap in range(taps)]
        return functools.reduce(torch.add, parts)


def hashed_ngrams(self, input_ids, cache):
    """The forward method of `Qwen4ExpTextNGramEmbedding`. The state of a row is its last tokens.

    A token before the begin of a document is the eos token, which is therefore stored as 0.
    """
    length, earlier = input_ids.shape[1], self.context_len
    ids = (input_ids - self.eos_token_id).float()  # exact: a vocabulary has less than 2 ** 24 tokens
    ids = cache.update_conv_state(ids, self.layer_idx, 2, conv_kernel_size=earlier)
    ids = ids.to(torch.int64) + self.eos_token_id
    tokens, blocks = [ids.narrow(1, earlier, length)], []
    for shift in range(1, self.ngram_size):
        token = ids.narrow(1, earlier - shift, length)
        if shift > 1:
            token = torch.where(tokens[-1] == self.eos_token_id, self.eos_token_id, token)
        tokens.append(token)
    mixed = tokens[0] * self.layer_multipliers[0]
    for shift in range(1, self.ngram_size):
        mixed = mixed ^ (tokens[shift] * self.layer_multipliers[shift])
        heads = slice((shift - 1) * self.heads_per_ngram, shift * self.heads_per_ngram)
        hashed = torch.remainder(mixed[..., None], self.ngram_heads_vocab_sizes[heads])
        blocks.append(hashed + self.ngram_heads_offsets[heads])
    return self.ngram_embedding(torch.cat(blocks, -1)).flatten(-2)


# The class of a module → its new forward method.
FORWARDS: dict[Any, Callable] = {
    "Qwen4ExpTextNGramEmbedding": hashed_ngrams,
    "ZayaCCAProjection": convolved_projections,
    "MiniMaxLightningAttention": lightning_attention,
    "RecurrentGemmaRecurrentBlock": gated_linear_recurrence,
}

# Classes whose forward method computes `self.dt_proj.weight @ x`.
MAMBA_MIXERS = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
