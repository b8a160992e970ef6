"""Damages the payloads of example programs, then loads and runs them.

    python test/fuzz_payloads.py --count 10000 [--seed 0] [--jobs 2]

Every damaged program must run or return an Error. Worker processes run the programs. If a worker
dies, hangs or takes too much memory, the script prints its last program and exits with code 1.
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

from executorch_mlx.serialization import ir
from executorch_mlx.serialization.pack import pack_payload
from executorch_mlx.serialization.read import read_payload
from irprograms import Model
from irprograms.examples import EXAMPLES

BATCH = 250  # programs per worker
SECONDS = 30  # timeout for one program
START_SECONDS = 120  # timeout for the imports of a worker
GIGABYTES = 4  # by which a program may increase the memory of its worker

# Values at limits of integer types: WORDS overwrite 32-bit words of the payload, and NUMBERS integer fields.
WORDS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
NUMBERS = (0, 1, -1, 2, 3, -2, 7, 64, 255, 1 << 16, 1 << 20, (1 << 31) - 1, -(1 << 31))
PADDING = 1024  # room for damage that makes a program longer


def mutated(value, rng: random.Random):
    """Return a random value that the schema allows in place of `value`. For the program, it is most likely wrong."""
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
        index = rng.randrange(len(changed))
        changed[index] = mutated(changed[index], rng)
        return changed
    if value is None:
        return rng.choice((None, ir.Tid(rng.randrange(24))))
    field = rng.choice(dataclasses.fields(value))
    return dataclasses.replace(value, **{field.name: mutated(getattr(value, field.name), rng)})


def mutate_fields(payload: bytes, rng: random.Random) -> bytes:
    """Change fields of some instructions. The result is a valid FlatBuffer."""
    graph = read_payload(payload)
    for _ in range(rng.choice((1, 1, 2, 4))):
        instruction = rng.choice(rng.choice(graph.instruction_chains).instructions)
        op = instruction.op
        if rng.random() < 0.1:
            same_fields = [node for node in ir.OPS.values() if node.FIELDS == op.FIELDS]
            op = rng.choice(same_fields)(**{f.name: getattr(op, f.name) for f in op.FIELDS})
        if op.FIELDS:
            name = rng.choice(op.FIELDS).name
            setattr(op, name, mutated(getattr(op, name), rng))
        instruction.op = op
    try:
        return pack_payload(graph)
    except (TypeError, ValueError):  # the packer refuses this mutation
        return mutate_fields(payload, rng)


def damage(payload: bytes, rng: random.Random) -> bytes:
    """Truncate a payload, mutate its fields, or change some of its bytes."""
    data = bytearray(payload)
    choice = rng.random()
    if choice < 0.05:
        return bytes(data[: rng.randrange(len(data))])
    if choice < 0.5:
        return mutate_fields(payload, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        # Damage to the header is always refused, so most mutations spare it.
        offset = rng.randrange(0 if rng.random() < 0.05 else 24, len(data))
        kind = rng.random()
        if kind < 0.4:
            data[offset] ^= 1 << rng.randrange(8)
        elif kind < 0.7:
            data[offset] = rng.randrange(256)
        else:
            offset -= offset % 4
            data[offset : offset + 4] = rng.choice(WORDS).to_bytes(4, "little")
    return bytes(data)


def peak_gigabytes() -> float:
    """The peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # Linux reports KiB


def run_worker(seed: int, start: int, count: int) -> None:
    """Run `count` damaged programs. Prints lines for `run_batch`.

    The line before a program is `try NUMBER NAME`, and the line after it is `ran` or `refused`. A line `memory` follows
    if the program used too much memory. The last line is `done`.
    """
    import torch

    torch.manual_seed(0)
    originals = []
    for name, make in EXAMPLES.items():
        graph, args = make()
        payload = graph.payload()
        padded = payload + bytes(PADDING)
        pte = graph.pte(padded)
        assert pte.count(padded) == 1
        Model(pte)(*args)
        originals.append((name, graph, payload, pte, args))
    base = peak_gigabytes()
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
        grown = peak_gigabytes() - base
        if grown > GIGABYTES:
            print("memory", f"{grown:.1f} GB", flush=True)
            base += grown
    print("done", flush=True)


@dataclasses.dataclass
class Counts:
    """Programs that ran, programs that were refused, and a line for each failure."""

    ran: int = 0
    refused: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


def run_batch(seed: int, start: int, count: int) -> Counts:
    """Run programs in workers. If a program kills its worker, it counts as a failure, and a new worker continues with
    the next program."""
    counts = Counts()
    end = start + count
    while start < end:
        with tempfile.TemporaryFile() as log:
            command = [sys.executable, __file__, "--work", str(seed), str(start), str(end - start)]
            worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, bufsize=0)
            current = None
            done = hung = False
            pending = b""
            while not done:
                seconds = START_SECONDS if current is None else SECONDS
                ready, _, _ = select.select([worker.stdout], [], [], seconds)
                chunk = os.read(worker.stdout.fileno(), 65536) if ready else b""
                if not chunk:
                    hung = not ready
                    break
                *lines, pending = (pending + chunk).split(b"\n")
                for line in map(bytes.decode, lines):
                    verb, _, rest = line.partition(" ")
                    counts.ran += verb == "ran"
                    counts.refused += verb == "refused"
                    done |= verb == "done"
                    if verb == "try":
                        current, start = rest, int(rest.split()[0]) + 1
                    if verb == "memory":
                        counts.failures.append(f"{current}: {rest}")
            worker.kill()
            worker.wait()
            if not done:
                log.seek(0)
                tail = log.read().decode(errors="replace").strip().splitlines()[-1:]
                outcome = "hung" if hung else "died"
                if current is None:
                    counts.failures.append(f"worker {outcome} before the first program: {tail}")
                    break
                counts.failures.append(f"{current}: {outcome} {tail} (repeat: --work {seed} {start - 1} 1)")
    return counts


def fuzz(count: int, seed: int, jobs: int = 1) -> Counts:
    """Run `count` damaged programs, `jobs` workers at a time."""
    starts = range(0, count, BATCH)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        batches = list(pool.map(lambda start: run_batch(seed, start, min(BATCH, count - start)), starts))
    failures = [line for counts in batches for line in counts.failures]
    return Counts(sum(c.ran for c in batches), sum(c.refused for c in batches), failures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10000, help="number of programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="workers at a time (%(default)s)")
    parser.add_argument("--work", type=int, nargs=3, metavar=("SEED", "START", "COUNT"), help="run as a worker")
    options = parser.parse_args()
    if options.work:
        run_worker(*options.work)
        return 0
    counts = fuzz(options.count, options.seed, options.jobs)
    total = counts.ran + counts.refused
    print(f"{total} programs: {counts.ran} ran, {counts.refused} refused, {len(counts.failures)} failed")
    print("\n".join(counts.failures))
    return 1 if counts.failures or total != options.count else 0


if __name__ == "__main__":
    sys.exit(main())
