"""Loads and runs programs again and again; prints what that left behind.

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


def cycle_of_two(model, args, first: str) -> None:
    """Two methods over one state, of which `first` goes first."""
    methods = {"forward": model.method, "sample": model.program.load_method("sample")}
    del model.method
    for method in methods.values():
        method.execute(args)
    for name in sorted(methods, key=first.__ne__):
        del methods[name], method
        model.program._methods[name] = method = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000)
    count = parser.parse_args().count
    from harness import Model, pte
    from programs import decoder

    graph, args = decoder()
    one, two = graph.pte(), pte({"forward": graph, "sample": graph})
    for i in range(count):
        if i % 2 == 0:
            Model(one)(*args)
        else:
            cycle_of_two(Model(two), args, first="forward" if i % 4 == 1 else "sample")
        if i == min(100, count // 2):
            threads, kilobytes = status("Threads"), status("VmRSS")
    gained = (status("VmRSS") - kilobytes) / 1024
    print(f"{status('Threads') - threads} {gained:.2f}")


if __name__ == "__main__":
    main()
