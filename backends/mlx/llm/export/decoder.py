"""A Hugging Face decoder whose KV caches are buffers of the program."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ...workarounds.set_order import sorted_sets
from .adapters import AdapterSlots
from .attention.cache import KVCache, PictureAttention
from .attention.cached import use_cached_attention
from .attention.key_bias import use_key_bias
from .attention.latent import absorb
from .attention.observe import Specs, observe
from .attention.rope import use_stateless_rotary
from .mtp import MTPDecoder
from .per_layer import per_layer_shape
from .positions import given_positions
from .precision import compute_dtype
from .quantization.tuning import decoder_layers
from .recurrent import cache_argument, kernels_of, use_cached_states
from .recurrent.state import StateCache, StateObserver, can_rewind, has_state


class Tracing(TorchFunctionMode):
    """A mode for the calls of a model, which leaves out calls that set the grad mode to what it already is.

    Rotary embeddings make such calls, with `torch.no_grad`. torch.export would record them, and later split the graph
    at each of them and join it again.
    """

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is torch._C._set_grad_enabled and arguments == (torch.is_grad_enabled(),):
            return None
        return function(*arguments, **(options or {}))


class CachedDecoder(torch.nn.Module):
    """`(tokens [1, S], input_pos, row or None) -> logits [1, 1 or S, V]` of the last position or of all.

    In place of the tokens, their embeddings can be given, floats `[1, S, width]`.

    The caches have `rows` rows, each for one sequence. `input_pos` and `row` are int64. If their shape is `[1]`, the
    tokens are consecutive: `input_pos` is the position of the first of them, and `row` is their row. If the shape is
    `[S]`, each token has a position and a row of its own. `row` is None if there is one row.

    The constructor changes `model` in place, so that its layers attend over the caches of this module. It raises
    ValueError if a layer uses its cache in a way that `KVCache` does not support.

    - `chunk`: the largest S; by default, and at most, `max_context_len`.
    - `window`: "auto" to follow the config of the model, or the window of every layer, where 0 stands for no window.
    - `specs`: the attribute `specs` of another decoder with the same model. If it is None, the constructor runs the
      model on a few tokens to find out the specs.
    - `ring_chunk`: limits the chunk of a model with sliding windows, whose ring buffers grow with the chunk.
    - `mtp`: the head for multi-token prediction, which the method `draft` runs. It is left out if draft tokens cannot
      be verified, because the model has states that cannot be rewound.
    - `logs_states`: whether states are logged, so that a row can be rewound after draft tokens. `can_rewind` says
      whether they are.
    - `adapters`: the adapters of the layers of `model`, or None.

    Of a model that takes pictures, `picture_attention` says how the tokens of a picture attend to each other, and
    `has_rope_offset` whether the methods have the input `rope`. The first `added_layers` layers add features of
    pictures to their results, which are behind the embeddings. So are the inputs of layers, if the model has some
    besides the embeddings.
    """

    picture_attention: PictureAttention | None = None
    has_rope_offset = False
    added_layers = 0

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int = 1,
        max_context_len: int,
        chunk: int | None = None,
        window: str | int = "auto",
        specs: Specs | None = None,
        ring_chunk: int | None = None,
        mtp: MtpModel | None = None,
        logs_states: bool = False,
        adapters: AdapterSlots | None = None,
    ):
        super().__init__()
        self.mtp = None
        self.adapters = adapters
        self.model = model
        self.rows, self.max_context_len = rows, max_context_len
        self.chunk = min(chunk or max_context_len, max_context_len)
        dtype = compute_dtype(model)
        absorb(model, dtype)
        use_key_bias(model)
        use_stateless_rotary(model)
        self.has_state = has_state(model.config.get_text_config())
        if self.has_state:
            use_cached_states(model)
        observer = StateObserver if self.has_state else None
        self.specs = observe(model, self._logits, max_context_len, window, observer) if specs is None else specs
        windows = [spec.span.window for spec in self.specs if spec is not None]
        if ring_chunk is not None and any(window is not None and window < max_context_len for window in windows):
            self.chunk = min(self.chunk, ring_chunk)
        self.cache = (StateCache if self.has_state else KVCache).register_on(
            self, self.specs, rows=rows, capacity=max_context_len, chunk=self.chunk, dtype=dtype
        )
        self.can_rewind = self.has_state and logs_states and can_rewind(self.specs)
        if self.can_rewind:
            self.cache.register_logs(self, self.specs)
        use_cached_attention(model, self.cache)
        if mtp is not None and self.can_verify_drafts:
            self.mtp = MTPDecoder(mtp, model, rows=rows, max_context_len=max_context_len, chunk=self.chunk)

    @property
    def can_verify_drafts(self) -> bool:
        """Whether a row can go back behind draft tokens that were wrong."""
        return not self.has_state or self.can_rewind

    @property
    def embedding_width(self) -> int:
        """The width of the embeddings, with what is behind them."""
        width = self.model.get_input_embeddings().embedding_dim
        return width * (1 + self.added_layers) + math.prod(per_layer_shape(self.model))

    @property
    def bytes(self) -> int:
        """The size of all caches together, in bytes."""
        return self.cache.bytes + (0 if self.mtp is None else self.mtp.bytes)

    def forward(
        self,
        tokens: torch.Tensor,
        input_pos: torch.Tensor,
        row: torch.Tensor | None = None,
        adapter: torch.Tensor | None = None,
        rope: torch.Tensor | None = None,
        *,
        all_positions: bool = False,
        keep_log: bool = False,
        is_picture: bool = False,
    ) -> torch.Tensor:
        """Run the model. With `keep_log`, `rewind` can then return to the states after the first of the tokens.

        `rope` is what to add to a position to get the rotary position, int64 with the shape of `input_pos`; or, for
        embeddings, the rotary positions [3, S]. With `is_picture`, the tokens attend to each other as
        `picture_attention` says.

        `adapter` is the slot of the adapter of each row, int64 with the shape of `input_pos`. None stands for none.
        """
        consecutive = input_pos.shape[0] == 1
        positions = torch.arange(tokens.shape[1], device=tokens.device) + input_pos if consecutive else input_pos
        picture = self.picture_attention if is_picture else None
        cache = self.cache.begin_call(tokens.shape[1], input_pos, row, picture)
        if rope is not None and rope.dim() == 1:
            positions = positions + rope
        positions = positions.unsqueeze(0) if rope is None or rope.dim() == 1 else rope.unsqueeze(1)
        # The tokens of different rows form a batch, because each row has its own state.
        is_batch = self.has_state and not consecutive
        if is_batch:
            tokens, positions = tokens.mT, positions.mT
        with nullcontext() if self.adapters is None else self.adapters.applied(adapter):
            logits = self._logits(tokens, positions, cache, all_positions=all_positions)
        if bypassed := sorted({layer.name for layer in cache.kv_layers} - cache.attended):
            names = ", ".join(bypassed)
            raise ValueError(f"export_llm: model: {names}: expected attention over the cache in every call")
        if self.has_state:
            cache.end_call(keep_log)
        return logits.transpose(0, 1) if is_batch else logits

    def rewind(self, tokens: torch.Tensor, input_pos: torch.Tensor, row: torch.Tensor | None = None) -> torch.Tensor:
        """Return to the states after `tokens` `[1, A]`, and return the next position `[1]`.

        The last call was for the same row, kept a log, began at `input_pos` `[1]` with these tokens, and had at most
        `rewind.LENGTH` tokens.
        """
        kept = tokens.shape[1]
        position = input_pos + kept
        self.cache.begin_call(kept, position, row).rewind(kept)
        return position

    def _logits(self, tokens, positions, cache: Any, *, all_positions: bool = False) -> torch.Tensor:
        known = inspect.signature(self.model.forward).parameters
        given, added = self._embedded(tokens) if tokens.is_floating_point() else ({"input_ids": tokens}, ())
        options = {"position_ids": positions, "logits_to_keep": 0 if all_positions else 1}
        options = {name: value for name, value in options.items() if name in known}
        options[cache_argument(self.model)] = cache
        kernels = kernels_of(self.model, cache) if self.has_state else nullcontext()
        places = nullcontext() if "position_ids" in known else given_positions(self.model, positions[0])
        with (
            Tracing(),
            sorted_sets(self.model),
            kernels,
            places,
            self._record_hidden_states(cache),
            self._adding(added),
        ):
            logits = self.model(**given, use_cache=True, **options).logits
        return logits if all_positions or "logits_to_keep" in known else logits[:, -1:]

    def _embedded(self, rows: torch.Tensor) -> tuple[dict[str, torch.Tensor], Sequence[torch.Tensor]]:
        """Return the arguments of the model for embeddings with what is behind them, and the features to add."""
        width = self.model.get_input_embeddings().embedding_dim
        embeddings, behind = rows.to(compute_dtype(self.model)).tensor_split([width], -1)
        if math.prod(shape := per_layer_shape(self.model)):
            return {"inputs_embeds": embeddings, "per_layer_inputs": behind.unflatten(-1, shape)}, ()
        return {"inputs_embeds": embeddings}, behind.split(width, -1) if self.added_layers else ()

    @contextmanager
    def _adding(self, features: Sequence[torch.Tensor]) -> Iterator[None]:
        """Within the context, the first layers add `features`, one [1, S, width] each, to their results."""
        layers = [layer for _, layer in decoder_layers(self.model)]
        with ExitStack() as hooks:
            for layer, added in zip(layers, features):
                hook = layer.register_forward_hook(lambda module, inputs, output, added=added: output + added)
                hooks.enter_context(hook)
            yield

    @contextmanager
    def _record_hidden_states(self, cache: Any) -> Iterator[None]:
        """Within the context, the last hidden states of the model are stored for `draft`."""
        if self.mtp is None:
            yield
            return

        def record(_, inputs, output):
            states = output[0]
            # A model with states runs the tokens of different rows as a batch.
            self.mtp.record(states if states.shape[0] == 1 else states.transpose(0, 1), cache.position, cache.row)

        hook = self.model.get_decoder().register_forward_hook(record)
        try:
            yield
        finally:
            hook.remove()
