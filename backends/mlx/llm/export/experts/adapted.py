"""Makes mixtures of experts use the experts interface of `transformers` if their own code bypasses it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch

from ..packed import gathered_product, is_experts

# (experts, hidden_states [T, H], index [T, K], weights [T, K]) → [T, H], as in the experts interface
ExpertsFunction = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def adapt(model: torch.nn.Module, function: ExpertsFunction) -> None:
    """Change each mixture of a known kind in `model`, in place, so that it calls `function` for the chosen experts.

    `stacked_weights` then names the weights of the experts, so that they can be quantized.
    """
    for module in list(model.modules()):
        if type(module).__name__ in ("JetMoeMoE", "JetMoeMoA"):
            _adapt_sorted_tokens(module)
        if type(module).__name__ == "DbrxExperts":
            _adapt_rows(module)
        experts = getattr(module, "experts", None)
        if not _has_stacked_weights(experts) or is_experts(experts):
            continue
        if hasattr(module, "shared_expert") and hasattr(getattr(module, "router", None), "top_k"):
            _adapt_scaled_inputs(module, function)
        elif hasattr(experts, "identity_expert") and hasattr(experts, "num_routed_experts"):
            _adapt_identities(experts, function)
        elif [*inspect.signature(experts.forward).parameters] == ["hidden_states", "top_k_index", "top_k_weights"]:
            _add_experts_attributes(experts, is_transposed=False)
            experts.forward = functools.partial(function, experts)


def _has_stacked_weights(experts) -> bool:
    weights = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    return hasattr(experts, "act_fn") and all(isinstance(w, torch.Tensor) and w.dim() == 3 for w in weights)


def _add_experts_attributes(experts: torch.nn.Module, *, is_transposed: bool) -> None:
    """Give `experts` the attributes that the experts interface reads."""
    experts.is_transposed, experts.has_gate, experts.is_concatenated = is_transposed, True, True
    experts.has_bias = experts.has_post_expert_norm = False

    def apply_gate(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return experts.act_fn(gate) * up

    if not hasattr(experts, "_apply_gate"):
        experts._apply_gate = apply_gate


def _adapt_scaled_inputs(mixture: torch.nn.Module, function: ExpertsFunction) -> None:
    """Change a mixture that multiplies each token by the score of the expert before the expert runs.

    The original runs every expert on every token; the score is 0 if the expert is not chosen.
    """
    experts = mixture.experts
    _add_experts_attributes(experts, is_transposed=True)

    def forward(hidden_states: torch.Tensor):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = mixture.router(x)
        out = mixture.shared_expert(x)
        values, index = scores.topk(mixture.router.top_k, -1)
        for value, chosen in zip(values.split(1, -1), index.split(1, -1)):
            out = out + function(experts, x * value, chosen, torch.ones_like(value))
        return out, logits

    mixture.forward = forward


def _adapt_sorted_tokens(mixture: torch.nn.Module) -> None:
    """Change a mixture of JetMoE, which sorts the tokens by expert and divides them into parts of variable sizes.

    A mixture of attention heads has two steps: `map` computes queries, and `reduce` computes the output.
    """
    router = mixture.router
    for linear in (mixture.input_linear, mixture.output_linear):
        linear.stacked_weights = ("weight",)

    def route(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = router.layer(tokens).float()
        values, index = logits.topk(router.top_k, -1)
        return index, values.softmax(-1).to(tokens.dtype), logits

    def merge(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = gathered_product(x, mixture.output_linear.weight, index)
        return (out.squeeze(2) * weights[..., None]).sum(1) + mixture.bias

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.flatten(0, 1)
        index, weights, _ = route(tokens)
        gate, up = gathered_product(tokens[:, None, None], mixture.input_linear.weight, index).chunk(2, -1)
        return merge(mixture.activation(gate) * up, index, weights).view_as(hidden_states)

    def map_(hidden_states: torch.Tensor):
        tokens = hidden_states.flatten(0, 1)
        index, weights, logits = route(tokens)
        queries = gathered_product(tokens[:, None, None], mixture.input_linear.weight, index)
        return queries.reshape(*hidden_states.shape[:2], router.top_k, -1), logits, (index, weights)

    def reduce(heads: torch.Tensor, choice: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return merge(heads.flatten(0, 1).unsqueeze(2), *choice).unflatten(0, heads.shape[:2])

    if hasattr(mixture, "map"):
        mixture.map, mixture.reduce = map_, reduce
    else:
        mixture.forward = forward


def _adapt_rows(experts: torch.nn.Module) -> None:
    """Change the experts of DBRX, whose weights are stacked along their rows, and which run one after the other."""
    mlp, shape = experts.mlp, (experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)
    mlp.stacked_weights = ("w1", "v1", "w2")
    for name in mlp.stacked_weights:
        weight = getattr(mlp, name)
        if isinstance(weight, torch.nn.Parameter) and weight.dim() == 2:
            rows = weight.data.view(shape)
            setattr(mlp, name, torch.nn.Parameter(rows.mT if name == "w2" else rows, weight.requires_grad))

    def forward(hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states.flatten(0, -2)[:, None, None]
        gate, up = (gathered_product(tokens, weight, index) for weight in (mlp.w1, mlp.v1))
        x = gathered_product(mlp.activation_fn(gate) * up, mlp.w2, index)
        return (x.squeeze(2) * weights[..., None]).sum(1).view_as(hidden_states)

    experts.forward = forward


def _adapt_identities(experts: torch.nn.Module, function: ExpertsFunction) -> None:
    """Change a module in which the experts from index `num_routed_experts` on only return their input."""
    _add_experts_attributes(experts, is_transposed=False)

    def forward(hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        is_routed = index < experts.num_routed_experts
        zero = torch.zeros_like(weights)
        out = function(experts, hidden_states, torch.where(is_routed, index, 0), torch.where(is_routed, weights, zero))
        out = out + hidden_states * torch.where(is_routed, zero, weights).sum(-1, keepdim=True)
        return out.to(hidden_states.dtype)  # the weights may be float32

    experts.forward = forward
