"""The models on which benchmarks/llm.py compares the runtimes.

`demo` is examples/demo_model. `qwen3-0.6b` has the shape of Qwen3-0.6B and random weights.

    python benchmarks/llm/models.py SHAPE FORMAT CAPACITY FOLDER

writes the checkpoint FOLDER/<shape>-<format>/, which mlx-lm loads, and exports it to the program
FOLDER/<shape>-<format>-<capacity>.pte, which this delegate runs. Both runtimes therefore use the same weights, except
that the program has scales of 16 bits. The formats w8a8 and w4a8 have 8-bit activations, KV caches of float16 and the
checkpoints of int8 and int4. int4_bf16 has the quantized weights of a bfloat16 model, and so bfloat16 activations and
KV caches. Existing files are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHAPES = ("qwen3-0.6b", "demo")
FORMATS = ("float32", "int4")  # benchmarks/llm.py and benchmarks/engine.py measure these
ALL_FORMATS = ("float32", "bf16", "int8", "int4", "w8a8", "w4a8")  # benchmarks/peers_cpu.py measures these
BFLOAT16 = "_bf16"  # the end of the name of a format that quantizes the bfloat16 model
INT8_ACTIVATIONS = {"w8a8": "int8", "w4a8": "int4"}  # format with 8-bit activations → the format of its checkpoint


def _checkpoint(shape: str, form: str, root: Path) -> Path:
    return root / f"{shape}-{INT8_ACTIVATIONS.get(form, form)}"


def float32_folder(shape: str, root: Path) -> Path:
    """Return the Hugging Face checkpoint with float32 weights. Creates it if it is missing."""
    folder = _checkpoint(shape, "float32", root)
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if shape == "demo":
        model = AutoModelForCausalLM.from_pretrained(EXAMPLES / "demo_model", dtype=torch.float32)
        model.save_pretrained(folder)
        return folder

    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=151_643,
        eos_token_id=151_645,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def folder_of(shape: str, form: str, root: Path) -> Path:
    """Return the checkpoint that mlx-lm loads. Creates it if it is missing.

    mlx-lm converts int4 and int8, in groups of 64.
    """
    source = folder_of(shape, "bf16", root) if form.endswith(BFLOAT16) else float32_folder(shape, root)
    form = INT8_ACTIVATIONS.get(form, form)
    folder = _checkpoint(shape, form, root)
    if (folder / "config.json").exists():
        return folder
    if form == "bf16":
        cast(source, folder)
    else:
        convert(source, folder, bits=int(form.removesuffix(BFLOAT16)[3:]))
    return folder


def cast(source: Path, folder: Path) -> None:
    """Write the checkpoint `source` with bfloat16 weights to `folder`."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(source / "model.safetensors")
    save_file({k: w.to(torch.bfloat16) for k, w in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def convert(source: Path, folder: Path, bits: int) -> None:
    """Write `source` to `folder`, quantized like `mlx_lm.convert -q --q-bits BITS --q-group-size 64`. No tokenizer."""
    import json

    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model, quantize_model

    model, config = load_model(source)
    model, config = quantize_model(model, config, group_size=64, bits=bits)
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def program_of(shape: str, form: str, capacity: int, root: Path) -> Path:
    """Return the exported program, with a sampling head. Exports it if it is missing."""
    path = root / f"{shape}-{form}-{capacity}.pte"
    folder = folder_of(shape, form, root)
    if path.exists():
        return path
    from executorch_mlx.llm.export import HeadConfig, export_llm

    exported = export_llm(
        load(folder), max_context_len=capacity, head=HeadConfig(min_p=False), verify=False, **activations_of(form)
    )
    unfinished = path.with_suffix(".part")
    exported.save(unfinished)
    unfinished.rename(path)
    return path


def load(folder: Path):
    """Return the model of a checkpoint.

    Scales and biases of quantized weights are rounded to float16, which `executorch-mlx export --quantize` uses as
    well. Activations keep their dtype.
    """
    import torch
    from executorch_mlx.llm.export.packed import Packed
    from executorch_mlx.llm.export.weights import load_causal_lm

    model = load_causal_lm(folder)
    for module in model.modules():
        if isinstance(module, Packed):
            for operand in (module.scales, module.biases):
                operand.data = operand.data.to(torch.float16)
    return model


def activations_of(form: str) -> dict:
    """The arguments of `export_llm` for the activations of a format."""
    return {"activations": "int8", "kv_bits": 16, "allow_extensions": True} if form in INT8_ACTIVATIONS else {}


def vocabulary_size(program: Path) -> int:
    """The vocabulary size of the model from which `program_of` exported `program`."""
    import json

    shape, form, _ = program.stem.rsplit("-", 2)
    folder = _checkpoint(shape, form, program.parent)
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def weight_bytes(shape: str, form: str, root: Path) -> int:
    return sum(file.stat().st_size for file in folder_of(shape, form, root).glob("*.safetensors"))


def cache_bytes(shape: str, capacity: int, root: Path) -> int:
    """The bytes of the KV cache in float32, for `capacity` positions."""
    import json

    config = json.loads((float32_folder(shape, root) / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * config["num_hidden_layers"] * heads * size * capacity


if __name__ == "__main__":
    shape, form, capacity, root = sys.argv[1:]
    Path(root).mkdir(parents=True, exist_ok=True)
    program_of(shape, form, int(capacity), Path(root))
