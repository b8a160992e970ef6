"""LoRA on an NVIDIA GPU: the time of a step beside mlx-lm's trainer and compiled torch, and losses beside the CPU's.

    python benchmarks/cuda/training.py export FOLDER [--shape qwen3-0.6b]     writes a training program; needs no GPU
    python benchmarks/cuda/training.py check FOLDER                           compares losses; run.sh calls it
    python benchmarks/cuda/training.py measure ROOT [--shape qwen3-0.6b]      prints the times

Adapters of rank 8 for all linear layers of the decoder layers, AdamW, and batches of random tokens. The weights are
bfloat16, or int4 with the suffix -int4, and random. Each side has the adapters that its users have: ours and mlx-lm's
are float32, those of torch bfloat16, with peft. mlx-lm and torch have no adapter dropout here, nor has ours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from op_runner import command, read, write

SIDES = ("ours", "mlx_lm", "compiled_torch")
R, ALPHA, LR, DECAY = 8, 16, 1e-4, 0.01
WARM_UP = 4  # steps that are not timed
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
# The check: a model whose losses both devices compute. Format → dtype, quantization, limit of the relative error.
CHECKS = {
    "float32": ("float32", "none", 1e-4),
    "bfloat16": ("bfloat16", "none", 2e-2),
    "int4": ("bfloat16", "int4", 2e-2),
}
CHECK_STEPS, CHECK_LENGTH, CHECK_VOCABULARY = 8, 40, 256


def export_program(model, path: Path, quantize: str, batch: int, length: int, dropout: float = 0.0) -> None:
    from executorch_mlx.llm.export.quantization.conversion import convert_weights
    from executorch_mlx.training import AdamW, LoRA, export_training
    from shapes import GROUP_SIZE

    settings = {"tokenizer": None, "calibrate": None, "progress": lambda step: None}
    convert_weights(model, quantize, GROUP_SIZE, model.dtype, **settings)
    lora = LoRA(R, ALPHA, dropout, targets=("*_proj",))
    program = export_training(model, lora=lora, optimizer=AdamW(weight_decay=DECAY), batch=batch, length=length)
    with open(path, "wb") as file:
        program.write_to_file(file)


def export(folder: Path, shape: str, batch: int, length: int) -> None:
    from export import empty_model
    from shapes import SHAPES, bits_of

    quantize = "int4" if bits_of(shape) == 4 else "none"
    export_program(empty_model(SHAPES[shape]), folder / f"training-{shape}.pte", quantize, batch, length)


def export_checks(folder: Path) -> None:
    import fused
    import torch
    import transformers

    for format, (dtype, quantize, _) in CHECKS.items():
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**fused.SHAPE)
        model = transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()
        export_program(model, folder / f"training-check-{format}.pte", quantize, 2, CHECK_LENGTH, dropout=0.1)


def write_batches(folder: Path, steps: int, batch: int, length: int, vocabulary: int) -> list[Path]:
    """Write the inputs of `train_step` for each step, and return their folders."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, vocabulary, (batch, length + 1))
    folders = []
    for step in range(1, steps + 1):
        folders.append(folder / f"in{step}")
        folders[-1].mkdir()
        values = (rows[:, :-1].copy(), rows[:, 1:].copy(), np.ones(rows[:, 1:].shape, np.float32))
        for i, value in enumerate((*values, np.array(LR, np.float32), np.array(step))):
            write(folders[-1] / f"{i}.tensor", value)
    return folders


def train(program: Path, device: str, steps: int, batch: int, length: int, vocabulary: int) -> dict[str, list[float]]:
    """Make steps on the same batch with this delegate. Return their losses and their times in seconds."""
    with tempfile.TemporaryDirectory() as name:
        inputs, outputs = write_batches(Path(name), steps, batch, length, vocabulary), Path(name) / "out"
        environment = os.environ | {"EXECUTORCH_MLX_DEVICE": device}
        run = [*command(program, inputs, outputs, "train_step"), "--times"]
        done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        losses = [read(outputs / str(call) / "0.tensor").item() for call in range(steps)]
    return {"losses": losses, "seconds": [float(line) for line in done.stdout.split()]}


def check(programs: Path) -> None:
    for format, (_, _, limit) in CHECKS.items():
        program = programs / f"training-check-{format}.pte"
        gpu, cpu = (
            train(program, device, CHECK_STEPS, 2, CHECK_LENGTH, CHECK_VOCABULARY)["losses"]
            for device in ("gpu", "cpu")
        )
        error = max(abs(a / b - 1) for a, b in zip(gpu, cpu, strict=True))
        print(f"training, {format}: {CHECK_STEPS} losses, largest relative error {error:.1e} (limit {limit:.0e})")
        assert error <= limit and gpu[-1] < gpu[0]


def ours(root: Path, shape: str, steps: int, batch: int, length: int) -> dict[str, list[float]]:
    from run import write_program
    from shapes import SHAPES

    program = write_program(root, f"training-{shape}")
    device = os.environ.get("EXECUTORCH_MLX_DEVICE", "gpu")
    return train(program, device, steps, batch, length, SHAPES[shape]["vocab_size"])


def mlx_lm(root: Path, shape: str, steps: int, batch: int, length: int) -> dict[str, list[float]]:
    import mlx.optimizers as optim
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm_side import load
    from shapes import SHAPES

    result: dict[str, list[float]] = {"losses": [], "seconds": []}

    class Report(TrainingCallback):
        def on_train_loss_report(self, information):
            result["losses"].append(information["train_loss"])
            result["seconds"].append(1 / information["iterations_per_second"])

    model = load(shape)
    model.freeze()
    keys = {f"{block}.{name}" for block, names in PROJECTIONS.items() for name in names}
    linear_to_lora_layers(model, len(model.layers), {"rank": R, "scale": ALPHA / R, "dropout": 0.0, "keys": keys})
    rows = np.random.default_rng(0).integers(0, SHAPES[shape]["vocab_size"], (batch, length + 1))
    with tempfile.TemporaryDirectory() as folder:
        arguments = trainer.TrainingArgs(
            batch_size=batch,
            iters=steps,
            steps_per_report=1,
            steps_per_save=steps + 1,
            max_seq_length=length + 1,
            adapter_file=f"{folder}/adapters.safetensors",
        )
        data = [(row.tolist(), 0) for row in rows]
        optimizer = optim.AdamW(learning_rate=LR, weight_decay=DECAY)
        trainer.train(model, optimizer, data, args=arguments, training_callback=Report())
    return result


def compiled_torch(root: Path, shape: str, steps: int, batch: int, length: int) -> dict[str, list[float]]:
    import torch
    from peft import LoraConfig, get_peft_model
    from shapes import SHAPES
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        config = AutoConfig.for_model(**SHAPES[shape], dtype=torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    names = [name for names in PROJECTIONS.values() for name in names]
    lora = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, autocast_adapter_dtype=False).to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=DECAY, fused=True)
    rows = np.random.default_rng(0).integers(0, SHAPES[shape]["vocab_size"], (batch, length + 1))
    rows = torch.from_numpy(rows).to(device)

    @torch.compile
    def loss_of(tokens, targets):
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    result: dict[str, list[float]] = {"losses": [], "seconds": []}
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        result["losses"].append(loss.item())  # waits for the GPU
        result["seconds"].append(time.perf_counter() - begin)
    return result


def measure(root: Path, options: argparse.Namespace) -> None:
    from shapes import bits_of

    times = {}
    usual = SIDES[:2] if bits_of(options.shape) < 16 else SIDES
    for side in options.only or usual:
        arguments = ["side", root, "--shape", options.shape, "--steps", options.steps, "--only", side]
        sizes = ["--batch", options.batch, "--length", options.length]
        call = [sys.executable, __file__, *map(str, [*arguments, *sizes])]
        try:
            done = subprocess.run(call, capture_output=True, text=True, timeout=options.timeout, check=True)
        except subprocess.SubprocessError as error:
            print(f"{side}: {error}\n{error.stderr or ''}"[-3000:], flush=True)
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        losses, seconds = result["losses"], result["seconds"][WARM_UP:]
        times[side] = statistics.median(seconds)
        print(
            f"{options.shape}, {options.batch} x {options.length} tokens, {side}: median {times[side] * 1e3:.1f} ms, "
            f"fastest {min(seconds) * 1e3:.1f} ms, {options.batch * options.length / times[side]:.0f} tokens/s, "
            f"first step {result['seconds'][0]:.1f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}",
            flush=True,
        )
    for side in times:
        if side != "ours" and "ours" in times:
            print(f"{options.shape}: {side} takes {times[side] / times['ours']:.2f} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("export", "check", "measure", "side"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each side")
    parser.add_argument("--only", choices=SIDES, action="append")
    options = parser.parse_args()
    sizes = options.batch, options.length
    if options.what == "export":
        options.folder.mkdir(parents=True, exist_ok=True)
        export(options.folder, options.shape, *sizes)
    elif options.what == "check":
        check(options.folder)
    elif options.what == "measure":
        measure(options.folder, options)
    else:
        (side,) = options.only
        print(json.dumps(globals()[side](options.folder, options.shape, options.steps, *sizes)))


if __name__ == "__main__":
    main()
