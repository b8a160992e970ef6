"""Makes mixtures of experts read only the weights of the experts that are chosen for a token."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..packed import MLXExperts, gathered_product, is_experts
from .adapted import adapt

_INTERFACE_NAME = "mlx"


def use_gathered_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Make the experts of `model` use `mlx::gathered_matmul`, and return `model`.

    Changes `model` in place. A model without experts stays unchanged. Mixtures that compute their experts themselves
    are changed too if `adapt` knows their kind.
    """
    use_interface = any(is_experts(module) for module in model.modules())
    adapt(model, gathered_experts)
    if use_interface:
        ALL_EXPERTS_FUNCTIONS.register(_INTERFACE_NAME, gathered_experts)
        model.set_experts_implementation(_INTERFACE_NAME)
    return model


def gathered_experts(
    experts: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that the experts interface of `transformers` calls.

    Takes `hidden_states` [T, H] and, for each of the T tokens, the indices and the weights of its K
    experts, [T, K]. Returns [T, H].
    """
    x = hidden_states[:, None, None]
    if experts.has_gate:
        x = experts._apply_gate(_project(experts, "gate_up_proj", x, top_k_index))
    else:
        x = experts.act_fn(_project(experts, "up_proj", x, top_k_index))
    x = _project(experts, "down_proj", x, top_k_index).squeeze(2)
    if experts.has_post_expert_norm:
        x = experts.post_expert_norm(x)
    return (x * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _project(experts, name: str, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [T, 1 or K, 1, I] by the weights `name` of the experts that `index` [T, K] selects.

    Returns [T, K, 1, N].
    """
    weight = getattr(experts, name)
    is_transposed = experts.is_transposed and not isinstance(weight, MLXExperts)
    y = gathered_product(x, weight.mT if is_transposed else weight, index)
    if experts.has_bias:
        y = y + getattr(experts, f"{name}_bias")[index].unsqueeze(2)
    return y
