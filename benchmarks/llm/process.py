"""Memory and file cache, for the workers of benchmarks/llm.py."""

from pathlib import Path


def resident(pid: int | str = "self") -> int:
    """The resident memory of a process in bytes, including mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has ended")


def cache_files(*files: Path) -> None:
    """Read `files`, so that the system caches them."""
    for path in files:
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
