"""Models whose layers keep a state: kernels of recurrences over tokens, the loops that they replace, and transformers.

    python benchmarks/layer_states.py [qwen3_5 mamba2 mamba] [--layers 4] [--rounds 5] [--threads 2]

The models have layers of the shapes of real ones, a hidden size of 1024, and random weights: int8 in Qwen3.5, float32
in the others. The table has medians in milliseconds: a call with 256 tokens of a prompt, and one with a single token
after it. "kernels" is the program as it is exported. "loops" is the same program without the replacements for
recurrences and states: it runs the instructions that ExecuTorch's own MLX delegate runs. "transformers" is the eager
model of transformers with float32 weights. Each of the three has a process of its own. They take turns in each round.

"state" is the size of the states of all layers, and "limit" the time in which a token could read and write them once,
at the speed of a copy between two arrays of this size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parents[1] / "build" / "benchmarks" / "layer_states"
PROMPT, STEPS, CONTEXT = 256, 8, 512
SETTLE = 0.02  # seconds in which the threads of the process before come to rest
COMMON = dict(
    hidden_size=1024, vocab_size=8192, bos_token_id=0, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False
)


def hybrid(layers):
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]


# Name → class in transformers without the suffix, format of the weights, function that returns the options for a
# number of layers.
FAMILIES = {
    "qwen3_5": (
        "Qwen3_5",
        "int8",
        lambda layers: dict(
            intermediate_size=3584,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            layer_types=hybrid(layers),
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
    ),
    "mamba2": ("Mamba2", "none", lambda layers: dict(num_heads=32, head_dim=64, state_size=128, n_groups=1, expand=2)),
    "mamba": ("Mamba", "none", lambda layers: dict(state_size=16, time_step_rank=64, expand=2)),
}


def make(name, layers):
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    prefix, _, options = FAMILIES[name]
    config = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    return getattr(transformers, f"{prefix}ForCausalLM")(
        config(**COMMON, num_hidden_layers=layers, **options(layers))
    ).eval()


def export(name, layers, has_kernels):
    """Return the path of the program. Exports it if the file does not exist."""
    from executorch_mlx.builder.emitter import Emitter
    from executorch_mlx.llm.export import export_llm
    from executorch_mlx.serialization import ir

    FOLDER.mkdir(parents=True, exist_ok=True)
    path, form = FOLDER / f"{name}-{layers}-{'kernels' if has_kernels else 'loops'}.pte", FAMILIES[name][1]
    left_out = {ir.GatedRecurrenceNode, ir.SelectiveScanNode, ir.ReadLayerStateNode}
    emit_replaceable = Emitter.emit_replaceable

    def emit(builder, extension, fields, instructions):
        return instructions() if extension in left_out else emit_replaceable(builder, extension, fields, instructions)

    if not path.exists():
        with mock.patch.object(Emitter, "emit_replaceable", emit_replaceable if has_kernels else emit):
            export_llm(
                make(name, layers),
                chunk=CONTEXT,
                max_context_len=CONTEXT,
                batch=1,
                outputs="logits",
                quantize=form,
                verify=False,
            ).save(path)
    return path


def timed(prefill, decode):
    """Return the milliseconds of a call with the prompt, and the median of those of later calls with one token."""
    start = time.perf_counter()
    prefill()
    times = [time.perf_counter() - start]
    for _ in range(STEPS):
        start = time.perf_counter()
        decode()
        times.append(time.perf_counter() - start)
    return 1e3 * times[0], 1e3 * statistics.median(times[1:])


def program_calls(path):
    import torch
    from executorch_mlx import Runtime

    program = Runtime.get().load_program(path)
    method = program.load_method("forward")
    prompt, at = torch.randint(1, 256, (1, PROMPT), generator=torch.Generator().manual_seed(1)), [0]

    def prefill(_program=program):  # ExecuTorch's Method does not keep its program alive
        at[0] = PROMPT
        method.execute([prompt, torch.tensor([0])])

    def decode():
        method.execute([prompt[:, :1], torch.tensor([at[0]])])
        at[0] += 1

    return prefill, decode


def eager_calls(name, layers):
    import torch

    model = make(name, layers)
    key = "cache_params" if "mamba" in name else "past_key_values"
    prompt, cache = torch.randint(1, 256, (1, PROMPT), generator=torch.Generator().manual_seed(1)), {}

    def call(tokens, **options):
        with torch.no_grad():
            cache[key] = getattr(model(tokens, use_cache=True, **options), key)

    return lambda: call(prompt), lambda: call(prompt[:, :1], **cache)


def work(connection, make_calls, arguments, threads):
    """The loop of a process: makes a round of calls and sends its times, for each message until it gets None."""
    import torch

    torch.set_num_threads(threads)
    calls = make_calls(*arguments)
    timed(*calls)
    connection.send(None)
    while connection.recv() is not None:
        time.sleep(SETTLE)
        connection.send(timed(*calls))


def measure(tasks, options):
    """Return the medians of each task, which is a function that makes the calls, and its arguments."""
    spawn, connections = multiprocessing.get_context("spawn"), []
    for make_calls, arguments in tasks:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=work, args=(theirs, make_calls, arguments, options.threads), daemon=True).start()
        ours.recv()
        connections.append(ours)
    rounds = []
    for _ in range(options.rounds):
        times = []
        for connection in connections:
            connection.send(True)
            times.append(connection.recv())
        rounds.append(times)
    for connection in connections:
        connection.send(None)
    return [[statistics.median(x) for x in zip(*task, strict=True)] for task in zip(*rounds, strict=True)]


def state_bytes(name, layers):
    """The bytes of the states of the recurrences of all layers."""
    from executorch_mlx.llm.export.decoder import CachedDecoder

    decoder = CachedDecoder(make(name, layers), max_context_len=CONTEXT)
    return sum(x.nbytes for buffer, x in decoder.named_buffers(recurse=False) if buffer.startswith("recurrent_state"))


def copy_seconds(count):
    """The seconds that a copy of `count` bytes takes."""
    import torch

    x = torch.ones(count // 4)
    y, times = torch.empty_like(x), []
    for _ in range(20):
        start = time.perf_counter()
        y.copy_(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=list(FAMILIES))
    for name, default in {"layers": 4, "rounds": 5, "threads": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # all processes read it when they start
    if unknown := set(options.families) - set(FAMILIES):
        parser.error(f"families: got {', '.join(unknown)}, expected {', '.join(FAMILIES)}")
    programs = {name: [export(name, options.layers, x) for x in (True, False)] for name in options.families}
    print(f"{options.threads} threads; load averages before: " + " ".join(f"{x:.2f}" for x in os.getloadavg()))
    titles = ("kernels", "loops", "transformers", "loops/kernels", "transformers/kernels")
    print(f"{'':24}" + "".join(f"{title:>{len(title) + 2}}" for title in titles))
    for name, paths in programs.items():
        tasks = [*((program_calls, (path,)) for path in paths), (eager_calls, (name, options.layers))]
        results = measure(tasks, options)
        count = state_bytes(name, options.layers)
        for label, times in zip((f"prefill {PROMPT}", "decode"), zip(*results, strict=True), strict=True):
            kernels, loops, eager = times
            values = (kernels, loops, eager, loops / kernels, eager / kernels)
            row = "".join(f"{x:>{len(title) + 2}.2f}" for x, title in zip(values, titles, strict=True))
            print(f"{name:12}{label:12}{row}", flush=True)
        print(f"{'':12}state {count / 1e6:.1f} MB, limit {1e3 * copy_seconds(count):.2f} ms", flush=True)
    print("load averages after: " + " ".join(f"{x:.2f}" for x in os.getloadavg()))


if __name__ == "__main__":
    main()
