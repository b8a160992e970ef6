"""LoRA adapters of the model of `small_llm`, in folders as peft and mlx-lm write them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

SLOTS, RANK = 3, 8  # of the program
TARGETS = {"self_attn.q_proj": (32, 32), "self_attn.v_proj": (32, 16), "mlp.down_proj": (64, 32)}
Weights = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def weights(seed: int, rank: int, targets: Mapping[str, tuple[int, int]] = TARGETS) -> Weights:
    """Return random A [rank, inputs] and B [outputs, rank] of each layer, by the path of the layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    return {f"model.layers.0.{name}": (draw(rank, i), draw(o, rank)) for name, (i, o) in targets.items()}


def write_peft(folder: Path, layers: Weights, dtype: torch.dtype = torch.float32, **settings) -> Path:
    """Write a folder as peft does, and return it. By default, the scale is 2."""
    folder.mkdir()
    rank = next(iter(layers.values()))[0].shape[0]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*layers]} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    pairs = ((f"base_model.model.{path}.lora_{n}.weight", t) for path, ab in layers.items() for n, t in zip("AB", ab))
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in pairs}, folder / "adapter_model.safetensors")
    return folder


def write_mlx(folder: Path, layers: Weights, **parameters) -> Path:
    """Write a folder as mlx-lm does, and return it. `parameters` are those of LoRA, such as `scale`."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "lora_parameters": parameters}))
    tensors = {f"{path}.lora_{n}": t.T.contiguous() for path, ab in layers.items() for n, t in zip("ab", ab)}
    save_file(tensors, folder / "adapters.safetensors")
    return folder


def write_all(base: Path) -> dict[str, Path]:
    """Write adapters in several formats and of several ranks below `base`. Return their folders by name."""
    half = {"dtype": torch.bfloat16, "use_rslora": True, "alpha_pattern": {"down_proj": 1}}
    return {
        "peft": write_peft(base / "peft", weights(1, 4)),
        "pattern": write_peft(base / "pattern", weights(2, 8), **half),
        "mlx": write_mlx(base / "mlx", weights(3, 2), rank=2, scale=1.5),
        "old_mlx": write_mlx(base / "old_mlx", weights(4, 3), rank=3, scale=2.0, alpha=4.0),
    }
