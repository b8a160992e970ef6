"""LoRA on SmolLM2-135M-Instruct beside peft and torch's AdamW: losses, time of a step and memory, by turns.

    python benchmarks/training.py [--steps 50] [--length 128] [--batch 1] [--quantize int4] [--group-size 32]
        [--checkpoint] [--only ours | --only torch] [--layers 30]

Both sides begin with the same adapter and get the same batches, text of this repository's documentation. In each round,
both make one step. "difference" is the largest difference of the losses of a step; with `--quantize`, torch keeps the
float weights. "logits" is the largest difference of the logits of two peft models: the one that torch has trained, and
one with the adapter that the program has written. CPU times are the sum of all processors.

`--only` runs one side, and prints the peak of the resident memory of its process during the steps, without that of
loading a checkpoint or a tokenizer. The weights count on both sides: those of torch are private memory, those of the
program pages of its file, which the system can drop. The program is exported once, into build/benchmarks/training.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parents[1]
LR, R, ALPHA = 1e-3, 8, 16
TARGETS = ("*_proj",)


def export(args, path: Path) -> None:
    import smollm2
    import torch
    from executorch_mlx.llm.export.quantization.conversion import convert_weights
    from executorch_mlx.training import AdamW, LoRA, export_training

    model = smollm2.load(args.layers)
    settings = {"tokenizer": None, "calibrate": None, "progress": lambda step: None}
    convert_weights(model, args.quantize, args.group_size, torch.float32, **settings)
    program = export_training(
        model,
        lora=LoRA(R, ALPHA, targets=TARGETS),
        optimizer=AdamW(weight_decay=0.01),
        batch=args.batch,
        length=args.length,
        checkpoint_layers=model.model.layers if args.checkpoint else (),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        program.write_to_file(file)


def batches(args, tokenizer):
    import smollm2
    import torch

    ids = torch.tensor(tokenizer(smollm2.text())["input_ids"])
    for step in range(args.steps):
        first = step * args.batch * args.length % (len(ids) - args.batch * args.length - 1)
        row = ids[first : first + args.batch * args.length + 1]
        shape = args.batch, args.length
        yield row[:-1].reshape(shape).contiguous(), row[1:].reshape(shape).contiguous(), torch.ones(shape)


class Torch:
    def __init__(self, args, model, folder):
        import torch
        from peft import LoraConfig, PeftModel, get_peft_model

        if folder is None:
            names = {path.rpartition(".")[2] for path, _ in model.named_modules() if path.endswith("_proj")}
            config = LoraConfig(r=R, lora_alpha=ALPHA, target_modules=sorted(names), task_type="CAUSAL_LM")
            self.model = get_peft_model(model, config)
        else:
            self.model = PeftModel.from_pretrained(model, folder, is_trainable=True)
        if args.checkpoint:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR, weight_decay=0.01)

    def step(self, tokens, targets, mask, step):
        from torch.nn import functional as F

        self.optimizer.zero_grad()
        logits = self.model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--only", choices=["ours", "torch"])
    args = parser.parse_args()
    format = args.quantize if args.quantize == "none" else f"{args.quantize}-{args.group_size}"
    name = f"{format}-{args.layers}-{args.batch}x{args.length}{'-checkpoint' * args.checkpoint}.pte"
    pte = ROOT / "build" / "benchmarks" / "training" / name
    if not pte.exists():
        begin, cpu = time.perf_counter(), time.process_time()
        export(args, pte)
        print(f"export: {time.perf_counter() - begin:.0f} s, {time.process_time() - cpu:.0f} s of CPU", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # the memory of the export does not count

    import smollm2
    from executorch_mlx.training import TrainingProgram
    from executorch_mlx.training.adapter import write_adapter

    folder = Path(tempfile.mkdtemp())
    sides = {}
    if args.only != "torch":
        program = TrainingProgram(pte)
        write_adapter(folder, program, None)
        sides["ours"] = lambda batch, step: program.train_step(*batch, LR, step)
    if args.only != "ours":
        trained = Torch(args, smollm2.load(args.layers), None if args.only else folder)
        sides["torch"] = lambda batch, step: trained.step(*batch, step)

    tokenizer = smollm2.tokenizer()
    _reset_peak()
    times, cpu, losses = ({side: [] for side in sides} for _ in range(3))
    for step, batch in enumerate(batches(args, tokenizer), 1):
        for side, run in sides.items():
            begin, cpu_begin = time.perf_counter(), time.process_time()
            losses[side].append(run(batch, step))
            times[side].append(time.perf_counter() - begin)
            cpu[side].append(time.process_time() - cpu_begin)
        if step % 10 == 0:
            print(step, {side: round(values[-1], 4) for side, values in losses.items()}, flush=True)
    for side, values in times.items():
        print(
            f"{side}: median {statistics.median(values):.3f} s, fastest {min(values):.3f} s; "
            f"CPU time: median {statistics.median(cpu[side]):.3f} s, fastest {min(cpu[side]):.3f} s"
        )
    if args.only:
        print(
            f"{args.only}: peak {_status('VmHWM')} MiB; now {_status('RssAnon')} private, {_status('RssFile')} of files"
        )
        return
    ratios = [a / b for a, b in zip(times["torch"], times["ours"])]
    by_cpu = statistics.median(a / b for a, b in zip(cpu["torch"], cpu["ours"]))
    print(f"torch/ours: median of the rounds {statistics.median(ratios):.2f}, by CPU time {by_cpu:.2f}")
    pairs = list(zip(losses["ours"], losses["torch"]))
    print(f"difference: {max(abs(a - b) for a, b in pairs):.2e}, relative {max(abs(a / b - 1) for a, b in pairs):.2e}")
    falls = {side: _fall(values) for side, values in losses.items()}
    print(", ".join(f"{side}: the loss falls by {fall:.4f}" for side, fall in falls.items()), end="; ")
    print(f"ours/torch {falls['ours'] / falls['torch']:.4f}")
    if args.quantize == "none":
        print(f"logits: {_logits_difference(args, program, trained, batch, folder):.2e}")


def _fall(losses: list[float]) -> float:
    """Return by how much the mean of a tenth of the losses falls from the first to the last tenth."""
    count = max(1, len(losses) // 10)
    return statistics.mean(losses[:count]) - statistics.mean(losses[-count:])


def _reset_peak() -> None:
    """Return freed memory to the system, and let Linux forget the peak of the resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) // 1024


def _logits_difference(args, program, trained, batch, folder) -> float:
    import smollm2
    import torch
    from executorch_mlx.training.adapter import write_adapter
    from peft import PeftModel

    write_adapter(folder, program, None)
    with torch.no_grad():
        expected = trained.model.eval()(input_ids=batch[0]).logits
        actual = PeftModel.from_pretrained(smollm2.load(args.layers), folder).eval()(input_ids=batch[0]).logits
    return (actual - expected).abs().max().item()


if __name__ == "__main__":
    main()
