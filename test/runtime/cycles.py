"""Loads and runs a program again and again; prints what that left behind.

    python test/runtime/cycles.py --count 2000

prints threads gained and megabytes of resident memory gained after the first 100.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


def status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(key + ":")[1].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    count = parser.parse_args().count
    from harness import Model
    from programs import decoder

    graph, args = decoder()
    pte = graph.pte()
    for i in range(count):
        Model(pte)(*args)
        if i == min(100, count // 2):
            threads, kilobytes = status("Threads"), status("VmRSS")
    gained = (status("VmRSS") - kilobytes) / 1024
    print(f"{status('Threads') - threads} {gained:.2f}")


if __name__ == "__main__":
    main()
