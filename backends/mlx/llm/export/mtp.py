"""Multi-token prediction: the head of a checkpoint that guesses the token after the next one."""

from __future__ import annotations

import re
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_layers import MtpModel
from transformers.modeling_utils import LoadStateDictConfig

from .attention.cache import KVCache, lazy_zeros
from .attention.cached import use_cached_attention
from .attention.latent import absorb
from .attention.observe import STATE_KINDS, observe
from .checkpoints.load_checks import shortened
from .weights import compute_dtype


class UnknownHead(Exception):
    """A checkpoint has a head for multi-token prediction, but its layout is unknown. The message says why."""


# The tensors of a head in the layout of Qwen3-Next and Qwen3.5, besides those of its layers.
_QWEN_TENSORS = {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
_QUANTIZED = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv")  # the ends of names of tensors
# The names under which the configs of such checkpoints store the number of layers of the head. Some have none of them.
_QWEN_NUM_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def load_mtp(model: PreTrainedModel, folder: Path) -> MtpModel | None:
    """Return the first layer of the head in the Hugging Face checkpoint `folder` of `model`, or None without a head.

    Embeddings and output projection are those of `model`. Raises ValueError if weights of the layer are missing, and
    `UnknownHead` if the layout of the head is unknown.
    """
    config = model.config.get_text_config()
    with ExitStack() as stack:
        weights = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            weights |= {key: file.get_slice(key) for key in file.keys() if _is_of_head(key, config.num_hidden_layers)}
        if not weights:
            return None
        if quantized := [key for key in weights if key.endswith(_QUANTIZED)]:
            raise UnknownHead(f"its weights are quantized, such as {min(quantized)}")
        if getattr(config, "num_mtp_layers", None):
            head = _build(model)
        elif _QWEN_TENSORS <= weights.keys():
            head = _build_qwen(model)
        elif any(key.startswith("mtp.") for key in weights):
            raise UnknownHead(f"the names of its tensors are unknown, such as {min(weights)}")
        else:
            return None
        conversions = head.get_weight_conversions(model)
        info, _ = convert_and_load_state_dict_in_model(
            model=head,
            state_dict=weights,
            load_config=LoadStateDictConfig(weight_mapping=conversions, dtype=model.config.dtype),
        )
        head._adjust_missing_and_unexpected_keys(info)
    if info.missing_keys:
        raise ValueError(f"{folder}: missing tensors for the multi-token prediction: {shortened(info.missing_keys)}")
    return head.eval().requires_grad_(False)


def _build(model: PreTrainedModel) -> MtpModel:
    """Return a head with one layer for `model`, without weights. Raises UnknownHead if `transformers` has none."""
    try:
        head = MtpModel(model, 1)
    except ValueError as error:  # the config does not say what kind of layer it is
        raise UnknownHead(str(error)) from error
    kinds = getattr(head.config, "layer_types", None) or ()
    if not STATE_KINDS.isdisjoint(kinds):
        raise UnknownHead(f"its layer is of kind {kinds[0]}, expected attention")
    return head


def _build_qwen(model: PreTrainedModel) -> MtpModel:
    """Return a head with the layout of Qwen3-Next and Qwen3.5, whose layer has full attention, without weights."""
    config = model.config.get_text_config()
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise UnknownHead("it has embeddings of its own, expected those of the model")
    number = next((n for n in (getattr(config, name, None) for name in _QWEN_NUM_LAYERS) if n), 1)
    kinds = getattr(config, "mtp_layer_types", None)
    missing = {"num_mtp_layers": number} | ({} if kinds else {"mtp_layer_types": ["full_attention"] * number})
    for name, value in missing.items():
        setattr(config, name, value)
    try:
        head = _build(model)
    finally:
        for name in missing:
            delattr(config, name)
    # `transformers` takes the class of the norms from the last layer of the model, which may be another kind of layer.
    norm, layer = type(model.get_decoder().norm), head.layers[0]
    for name in ("enorm", "hnorm", "post_norm"):
        setattr(layer, name, norm(config.hidden_size, eps=config.rms_norm_eps))
    return head


def _is_of_head(key: str, layers: int) -> bool:
    """Whether the tensor `key` of a checkpoint belongs to the head of a model with `layers` layers."""
    layer = re.search(r"\.layers\.(\d+)\.", key)
    return layer is not None and int(layer[1]) == layers or re.match(r"(model\.)?mtp\.", key) is not None


@contextmanager
def without_ends(head: MtpModel):
    """Within the context, `head` lacks the embeddings and the output projection, which it shares with the model."""
    ends = head.embed_tokens, head.shared_head
    head.embed_tokens = head.shared_head = None
    try:
        yield head
    finally:
        head.embed_tokens, head.shared_head = ends


class MTPDecoder(torch.nn.Module):
    """`(tokens [1, S], input_pos [1], row [1] or None, row_length [1]) -> logits [1, 1, V]` after the last token.

    The head combines the hidden state that the model computed for a position p with the token at p + 1, and predicts
    the token at p + 2. `input_pos` is the position p of the first hidden state. `tokens` are therefore the tokens from
    position `input_pos + 1` on. The head keeps keys and values of its own; those of the pair (p, p + 1) are at
    position p.

    `record` stores hidden states that the model has computed. `row_length` [1] is the number of hidden
    states that it has stored for the row. A call also stores the hidden state that the head itself computes for the
    last token, behind those of the model. The next call can then guess one more token before the model has computed
    this state.
    """

    def __init__(self, head: MtpModel, model: PreTrainedModel, *, rows: int, max_context_len: int, chunk: int):
        super().__init__()
        head.tie_with_main_model(model)
        dtype = compute_dtype(model)
        absorb(head, dtype)
        self.head, self.rows, self.max_context_len = head, rows, max_context_len
        size = head.config.hidden_size

        def call(tokens, positions, cache):
            head.forward_layer(0, torch.zeros(*tokens.shape, size, dtype=dtype), positions, cache, input_ids=tokens)

        specs = observe(head, call, max_context_len)
        self.cache = KVCache.register_on(self, specs, rows=rows, capacity=max_context_len, chunk=chunk, dtype=dtype)
        self.register_buffer("hidden", lazy_zeros((1, 1, rows * max_context_len, size), dtype))
        use_cached_attention(head, self.cache)

    def record(self, states: torch.Tensor, position: torch.Tensor, row: torch.Tensor | None) -> None:
        """Store the hidden states [1, S, H] of tokens. `position` and `row` are as in `CachedDecoder`."""
        updated = torch.ops.mlx.cache_update(
            self.hidden, states[None].to(self.hidden.dtype), position, False, row, self.rows
        )
        self.hidden.copy_(updated)

    def forward(self, tokens, input_pos, row, row_length) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device) + input_pos
        indices = positions if row is None else positions + row * self.max_context_len
        states = self.hidden[0, 0].index_select(0, indices)[None]
        cache = self.cache.begin_call(length, input_pos, row)
        states = self.head.forward_layer(0, states, positions[None] + 1, cache, input_ids=tokens)[:, -1:]
        self.record(states, torch.maximum(input_pos + length, row_length), row)
        return self.head._project_to_logits(states)

    @property
    def bytes(self) -> int:
        """The size of all buffers together, in bytes."""
        return self.cache.bytes + self.hidden.nbytes
