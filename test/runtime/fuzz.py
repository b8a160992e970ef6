"""Damages the payloads of real programs and runs what comes out.

    python test/runtime/fuzz.py --count 10000 [--seed 0] [--jobs 2]

Every damaged program has to end in an Error or a run. Workers are processes of
their own: one that dies, hangs or takes too much memory is counted, and how to
repeat it is printed. Exit code 1 if there was any.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BATCH = 250
SECONDS = 30  # for one program
GIGABYTES = 4

WORDS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


NUMBERS = (0, 1, -1, 2, 3, -2, 7, 64, 255, 1 << 16, 1 << 20, (1 << 31) - 1, -(1 << 31))
PADDING = 1024  # room for damage that makes a program longer


def other(value, rng: random.Random):
    """A value of the same kind as a field's, legal on the wire and mostly nonsense."""
    from harness import ir

    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + rng.choice((-1, 1)), rng.choice(NUMBERS)))
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, 1e30, float("inf"), float("nan"), value * 2))
    if isinstance(value, str):
        return rng.choice(("", "none", "edge", "mxfp4", "nvfp4", "mxfp8", "affine", value * 9))
    if isinstance(value, ir.Tid):
        return ir.Tid(rng.randrange(24))
    if isinstance(value, ir.Vid):
        return ir.Vid(rng.randrange(6))
    if isinstance(value, list):
        if not value or rng.random() < 0.3:
            return (value * 2)[: rng.randrange(2 * len(value) + 1)]
        changed = list(value)
        at = rng.randrange(len(changed))
        changed[at] = other(changed[at], rng)
        return changed
    if value is None:
        return rng.choice((None, ir.Tid(rng.randrange(24))))
    fields = [f for f in dataclasses.fields(value)]
    field = rng.choice(fields)
    return dataclasses.replace(value, **{field.name: other(getattr(value, field.name), rng)})


def distort(payload: bytes, rng: random.Random) -> bytes:
    """Well-formed on the wire, but with fields of some instructions changed."""
    from harness import ir, pack_payload

    from executorch_mlx.serialization.read import read_payload

    graph = read_payload(payload)
    for _ in range(rng.choice((1, 1, 2, 4))):
        instruction = rng.choice(rng.choice(graph.instruction_chains).instructions)
        op = instruction.op
        if rng.random() < 0.1:
            kinds = [k for k in ir.OPS.values() if k.FIELDS == op.FIELDS]
            op = rng.choice(kinds)(**{f.name: getattr(op, f.name) for f in op.FIELDS})
        if op.FIELDS:
            name = rng.choice(op.FIELDS).name
            setattr(op, name, other(getattr(op, name), rng))
        instruction.op = op
    try:
        return pack_payload(graph)
    except (TypeError, ValueError):  # the packer knows better than to write this
        return distort(payload, rng)


def damage(payload: bytes, rng: random.Random) -> bytes:
    data = bytearray(payload)
    how = rng.random()
    if how < 0.05:
        return bytes(data[: rng.randrange(len(data))])
    if how < 0.5:
        return distort(payload, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        # The header is small and soon refused: mostly leave it whole.
        at = rng.randrange(0 if rng.random() < 0.05 else 24, len(data))
        kind = rng.random()
        if kind < 0.4:
            data[at] ^= 1 << rng.randrange(8)
        elif kind < 0.7:
            data[at] = rng.randrange(256)
        else:
            at -= at % 4
            data[at : at + 4] = rng.choice(WORDS).to_bytes(4, "little")
    return bytes(data)


def work(seed: int, start: int, count: int) -> None:
    """Runs `count` damaged programs, announcing each before it is run."""
    sys.path.insert(0, str(HERE))
    from harness import Model
    from programs import PROGRAMS

    import torch

    torch.manual_seed(0)
    originals = []
    for name, make in PROGRAMS.items():
        graph, args = make()
        payload = graph.payload()
        room = payload + bytes(PADDING)
        pte = graph.pte(room)
        assert pte.count(room) == 1
        Model(pte)(*args)
        originals.append((name, graph, payload, pte, args))
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(start, start + count):
        rng = random.Random(f"{seed}-{i}")
        name, graph, payload, pte, args = rng.choice(originals)
        damaged = damage(payload, rng)
        room = len(payload) + PADDING
        if len(payload) <= len(damaged) <= room:
            file = pte.replace(payload + bytes(PADDING), damaged.ljust(room, b"\0"))
        else:
            file = graph.pte(damaged)
        print("try", i, name, flush=True)
        try:
            model = Model(file)
            for _ in range(2):
                model(*args)
            print("ran", flush=True)
        except RuntimeError:
            print("refused", flush=True)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 2**20
        if grown > GIGABYTES:
            print("memory", f"{grown:.1f} GB", flush=True)
            base += grown * 2**20
    print("done", flush=True)


def batch(seed: int, start: int, count: int) -> tuple[int, int, list[str]]:
    """(programs that ran, that were refused, what went wrong)."""
    ran = refused = 0
    wrong: list[str] = []
    end = start + count
    while start < end:
        with tempfile.TemporaryFile() as log:
            command = [sys.executable, __file__, "--work", str(seed), str(start), str(end - start)]
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, bufsize=0)
            last = "before the first"
            done = hung = False
            pending = b""
            while not done:
                ready, _, _ = select.select([worker.stdout], [], [], SECONDS * 4 if last[0] == "b" else SECONDS)
                chunk = os.read(worker.stdout.fileno(), 65536) if ready else b""
                if not chunk:
                    hung = not ready
                    break
                *lines, pending = (pending + chunk).split(b"\n")
                for line in map(bytes.decode, lines):
                    verb, _, rest = line.partition(" ")
                    ran += verb == "ran"
                    refused += verb == "refused"
                    done |= verb == "done"
                    if verb == "try":
                        last, start = rest, int(rest.split()[0]) + 1
                    if verb == "memory":
                        wrong.append(f"{last}: {rest}")
            worker.kill()
            worker.wait()
            if not done:
                log.seek(0)
                tail = log.read().decode(errors="replace").strip().splitlines()[-1:]
                what = "hung" if hung else "died"
                wrong.append(f"{last}: {what} {tail} (repeat: --work {seed} {start - 1} 1)")
                if last[0] == "b":
                    break
    return ran, refused, wrong


def fuzz(count: int, seed: int, jobs: int = 1) -> tuple[int, int, list[str]]:
    starts = range(0, count, BATCH)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda s: batch(seed, s, min(BATCH, count - s)), starts))
    wrong = [line for result in results for line in result[2]]
    return sum(r[0] for r in results), sum(r[1] for r in results), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--work", type=int, nargs=3, metavar=("SEED", "START", "COUNT"))
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return 0
    ran, refused, wrong = fuzz(options.count, options.seed, options.jobs)
    print(f"{ran + refused} programs: {ran} ran, {refused} refused, {len(wrong)} went wrong")
    print("\n".join(wrong))
    return 1 if wrong or ran + refused != options.count else 0


if __name__ == "__main__":
    sys.exit(main())
