"""LoRA on SmolLM2-135M-Instruct beside peft and torch's AdamW: losses, time of a step and memory, by turns.

    python benchmarks/training.py [--steps 50] [--length 128] [--batch 1] [--quantize int4] [--checkpoint]
        [--only ours | --only torch] [--layers 30]

Both sides begin with the same adapter and get the same batches, text of this repository's documentation. In each round,
both make one step. "difference" is the largest difference of the losses of a step; with `--quantize`, torch keeps the
float weights. "logits" is the largest difference of the logits of two peft models: the one that torch has trained, and
one with the adapter that the program has written. `--only` runs one side, and prints the peak of the resident memory of
its process during the steps, without that of loading a checkpoint or a tokenizer. The weights count on both sides: those
of torch are private memory, those of the program pages of its file, which the system can drop. The program is exported once, into build/benchmarks/training.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "executorch-mlx"
LR, R, ALPHA = 1e-3, 8, 16
TARGETS = ("*_proj",)


def gguf() -> Path:
    spec = importlib.util.spec_from_file_location("demo_llm", ROOT / "examples" / "demo_llm.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    return demo.fetch(CACHE)


def load(args):
    """Return the checkpoint, and its model in float32, with the first `--layers` layers."""
    import torch
    from executorch_mlx.llm.export.checkpoints.open import opened
    from executorch_mlx.llm.export.packed import MLXEmbedding, Packed

    checkpoint = opened(gguf(), "benchmark")
    model = checkpoint.load(torch.float32)
    del model.model.layers[args.layers :]
    model.config.num_hidden_layers = len(model.model.layers)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, Packed):
            weight = torch.nn.Parameter(layer.dequantized(), requires_grad=False)
            new = torch.nn.Embedding(1, 1) if isinstance(layer, MLXEmbedding) else torch.nn.Linear(1, 1, bias=False)
            new.weight = weight
            if isinstance(layer, MLXEmbedding):
                new.num_embeddings, new.embedding_dim = weight.shape
            else:
                new.out_features, new.in_features = weight.shape
            model.set_submodule(path, new)
    model.tie_weights()
    return checkpoint, model


def export(args, path: Path) -> None:
    import torch
    from executorch_mlx.llm.export.quantization.conversion import convert_weights
    from executorch_mlx.training import AdamW, LoRA, export_training

    _, model = load(args)
    convert_weights(
        model, args.quantize, None, torch.float32, tokenizer=None, calibrate=None, progress=lambda step: None
    )
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
    import torch

    text = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))[:400_000]
    ids = torch.tensor(tokenizer(text)["input_ids"])
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
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--only", choices=["ours", "torch"])
    args = parser.parse_args()
    name = f"{args.quantize}-{args.layers}-{args.batch}x{args.length}{'-checkpoint' * args.checkpoint}.pte"
    pte = ROOT / "build" / "benchmarks" / "training" / name
    if not pte.exists():
        begin, cpu = time.perf_counter(), time.process_time()
        export(args, pte)
        print(f"export: {time.perf_counter() - begin:.0f} s, {time.process_time() - cpu:.0f} s of CPU", flush=True)
        os.execv(sys.executable, [sys.executable, *sys.argv])  # the memory of the export does not count

    from executorch_mlx.training import TrainingProgram
    from executorch_mlx.training.adapter import write_adapter

    folder = Path(tempfile.mkdtemp())
    sides = {}
    if args.only != "torch":
        program = TrainingProgram(pte)
        write_adapter(folder, program, None)
        sides["ours"] = lambda batch, step: program.train_step(*batch, LR, step)
    if args.only == "ours":
        from executorch_mlx.llm.export.checkpoints.open import opened

        tokenizer = opened(gguf(), "benchmark").tokenizer()
    else:
        checkpoint, model = load(args)
        tokenizer = checkpoint.tokenizer()
        trained = Torch(args, model, None if args.only else folder)
        sides["torch"] = lambda batch, step: trained.step(*batch, step)

    _reset_peak()
    times, losses = {side: [] for side in sides}, {side: [] for side in sides}
    for step, batch in enumerate(batches(args, tokenizer), 1):
        for side, run in sides.items():
            begin = time.perf_counter()
            losses[side].append(run(batch, step))
            times[side].append(time.perf_counter() - begin)
        if step % 10 == 0:
            print(step, {side: round(values[-1], 4) for side, values in losses.items()}, flush=True)
    for side, values in times.items():
        print(f"{side}: median {statistics.median(values):.3f} s, fastest {min(values):.3f} s")
    if args.only:
        print(
            f"{args.only}: peak {_status('VmHWM')} MiB; now {_status('RssAnon')} private, {_status('RssFile')} of files"
        )
        return
    ratios = [a / b for a, b in zip(times["torch"], times["ours"])]
    print(f"torch/ours: median of the rounds {statistics.median(ratios):.2f}")
    pairs = list(zip(losses["ours"], losses["torch"]))
    print(f"difference: {max(abs(a - b) for a, b in pairs):.2e}, relative {max(abs(a / b - 1) for a, b in pairs):.2e}")
    if args.quantize == "none":
        print(f"logits: {_logits_difference(args, program, trained, batch, folder):.2e}")


def _reset_peak() -> None:
    """Return freed memory to the system, and let Linux forget the peak of the resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{field}:"))
    return int(line.split()[1]) // 1024


def _logits_difference(args, program, trained, batch, folder) -> float:
    import torch
    from executorch_mlx.training.adapter import write_adapter
    from peft import PeftModel

    write_adapter(folder, program, None)
    with torch.no_grad():
        expected = trained.model.eval()(input_ids=batch[0]).logits
        actual = PeftModel.from_pretrained(load(args)[1], folder).eval()(input_ids=batch[0]).logits
    return (actual - expected).abs().max().item()


if __name__ == "__main__":
    main()
