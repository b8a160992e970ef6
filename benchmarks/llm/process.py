"""What the workers of benchmarks/llm.py ask of the system."""

from pathlib import Path


def resident(pid: int | str = "self") -> int:
    """Bytes of memory that a process has in use, mapped files included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


def warm(*files: Path) -> None:
    """Have `files` in the system's cache."""
    for path in files:
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
