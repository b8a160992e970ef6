"""Loads and runs programs repeatedly, and prints how many threads and megabytes they leave behind.

    python test/leaks.py --count 2000

The output is two numbers: by how much the number of threads and the resident memory in megabytes have grown since the
100th program.
"""

import argparse
from pathlib import Path

from irprograms import Model, pte
from irprograms.examples import decoder


def process_status(key: str) -> int:
    """The number in the line `key` of /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(key + ":")[1].split()[0])


def run_two_methods(model: Model, args, first: str) -> None:
    """Run two methods that share their buffers, then unload them. The method named `first` is unloaded first."""
    methods = {"forward": model.method, "sample": model.program.load_method("sample")}
    del model.method
    for method in methods.values():
        method.execute(args)
    del method
    for name in sorted(methods, key=first.__ne__):  # `first`, then the other method
        model.program._methods[name] = None
        del methods[name]  # the last reference to the method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="number of programs (%(default)s)")
    count = parser.parse_args().count
    graph, args = decoder()
    one_method, two_methods = graph.pte(), pte({"forward": graph, "sample": graph})
    for i in range(count):
        if i % 2 == 0:
            Model(one_method)(*args)
        else:
            run_two_methods(Model(two_methods), args, first="forward" if i % 4 == 1 else "sample")
        if i == min(100, count // 2):
            threads, kilobytes = process_status("Threads"), process_status("VmRSS")
    gained = (process_status("VmRSS") - kilobytes) / 1024
    print(f"{process_status('Threads') - threads} {gained:.2f}")


if __name__ == "__main__":
    main()
