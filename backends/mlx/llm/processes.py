"""The processes of a tensor-parallel model: the names of its files, and the start of the other processes.

The process that loads the model is process 0, which runs the engine. The others run this module as a program: each
loads its part and makes the calls that process 0 makes.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import glob
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from ..loader import load_engine

_PART = re.compile(r"(.+)-(\d+)-of-(\d+)")
_FIRST_PORT = 32323  # if there are several machines, process r listens on the port _FIRST_PORT + r
_SECONDS_TO_END = 10  # how long `close` waits for a process
# The environment variables in which launchers pass a process its rank.
_RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# What a process gets of its machine. The runtime reads these variables at the first call, or later.
_SHARE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def part_path(path: str | Path, rank: int, size: int) -> Path:
    """Return the file of the part `rank` of a model in `size` parts: `model-0-of-2.pte` for `model.pte`."""
    path = Path(path)
    return path.with_name(f"{path.stem}-{rank}-of-{size}{path.suffix}")


def find_parts(path: str | Path) -> tuple[Path, int] | None:
    """Return the name of a model in parts, such as `model.pte`, and the number of its parts.

    `path` is this name, or that of a part. Returns None if `path` is a model in one part, or does not exist. Raises
    ValueError if there are several models in parts of that name.
    """
    path = Path(path)
    if (match := _PART.fullmatch(path.stem)) and int(match[3]) > 1:
        return path.with_name(match[1] + path.suffix), int(match[3])
    if path.exists():
        return None
    sizes = []
    for file in path.parent.glob(glob.escape(f"{path.stem}-0-of-") + f"*{path.suffix}"):
        if (match := _PART.fullmatch(file.stem)) and match[1] == path.stem:
            sizes.append(int(match[3]))
    if len(sizes) > 1:
        names = ", ".join(str(part_path(path, 0, size)) for size in sorted(sizes))
        raise ValueError(f"{path}: got models for several numbers of processes, expected the name of one: {names}")
    return (path, sizes[0]) if sizes else None


def rank_in_environment() -> int | None:
    """Return the rank that a launcher such as `mlx.launch` or `mpirun` gave this process, or None."""
    values = [os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name, "").isdecimal()]
    return int(values[0]) if values else None


def read_hosts(text: str) -> list[str]:
    """Return the hosts that `--hosts` names: a list separated by commas, or a file.

    The file has a host in each line, or is a hostfile of `mlx.launch`. The first address of each host in it counts.
    Raises ValueError if the file is invalid.
    """
    path = Path(text)
    if not path.is_file():
        return [host.strip() for host in text.split(",") if host.strip()]
    content = path.read_text()
    if not content.lstrip().startswith(("[", "{")):
        lines = (line.strip() for line in content.splitlines())
        return [line for line in lines if line and not line.startswith("#")]
    try:
        entries = json.loads(content)
        entries = entries["hosts"] if isinstance(entries, dict) else entries
        return [(entry.get("ips") or [entry["ssh"]])[0] for entry in entries]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"hosts: {path}: expected a hostfile of mlx.launch: {error!r}") from error


class Processes:
    """The processes with the parts 1 to N - 1 of a model. The constructor starts them.

    `hosts` has the host of each process, from process 0 on. This process is process 0, and must be on the first host.
    On NVIDIA GPUs, the processes communicate by NCCL, and each has a GPU of its own. Otherwise, they communicate by
    MLX's ring. Processes on other hosts are started by ssh, and need the same Python, files and current folder.

    They end when process 0 frees its part, or ends. `LLMProgram.close`, which also runs at the exit of process 0, frees
    the part and then calls `close`. If one of them ends with an error, this process ends with exit status 1.
    """

    running: ClassVar[list[subprocess.Popen]] = []
    is_started: ClassVar[bool] = False  # whether this process has started a group; it can be in one group only

    def __init__(
        self, path: Path, size: int, hosts: Sequence[str], *, device: str | None = None, memory_limit: int | None = None
    ):
        if len(hosts) != size:
            raise ValueError(f"hosts: got {len(hosts)} for {path.name}, expected {size}, one for each part")
        if not is_local(hosts[0]):
            raise ValueError(f"hosts: got {hosts[0]} as the first one, expected this machine")
        if not part_path(path, 0, size).is_file():
            raise FileNotFoundError(f"{part_path(path, 0, size)}: no such file")
        environments = _environments(hosts, _uses_cuda(device))
        Processes.is_started = True
        self._is_closing = False
        arguments = [str(path), str(size), *(["--device", device] if device else [])]
        arguments += ["--memory-limit", str(memory_limit)] if memory_limit is not None else []
        self._processes = [
            _start(host, environment, arguments) for host, environment in zip(hosts[1:], environments[1:])
        ]
        Processes.running.extend(self._processes)
        self._environment = environments[0]
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, hosts[rank], process), daemon=True).start()

    def _watch(self, rank: int, host: str, process: subprocess.Popen) -> None:
        status = process.wait()
        if status != 0 and not self._is_closing:
            print(
                f"executorch-mlx: process {rank} on {host} ended with exit status {status}", file=sys.stderr, flush=True
            )
            for other in self._processes:
                other.kill()
            os._exit(1)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Set the environment variables of process 0 for the time in which it loads its part and joins the group.

        Its share of the machine stays set. A program that this process starts later must not take itself for a process
        of the group.
        """
        before = {name: os.environ.get(name) for name in self._environment if name not in _SHARE_VARIABLES}
        os.environ.update(self._environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """Wait until the processes have ended, which they do when process 0 frees the model. Kill those that do not."""
        self._is_closing = True
        for process in self._processes:
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()

    def kill(self) -> None:
        """End the processes at once."""
        self._is_closing = True
        for process in self._processes:
            process.kill()


def is_local(host: str) -> bool:
    """Whether `host` names this machine."""
    if host in ("localhost", "127.0.0.1", socket.gethostname()):
        return True
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
        try:
            own.bind((address, 0))  # only an address of this machine can be bound
        except OSError:
            return False
    return True


def _environments(hosts: Sequence[str], uses_nccl: bool) -> list[dict[str, str]]:
    """Return the environment variables of each process."""
    machines = ["localhost" if is_local(host) else host for host in hosts]  # this one may have several names
    all_local = set(machines) == {"localhost"}
    ports = _free_ports(len(hosts)) if all_local else [_FIRST_PORT + rank for rank in range(len(hosts))]
    addresses = ["127.0.0.1" if all_local else host for host in hosts]
    shared = {"EXECUTORCH_MLX_GROUP_HOST": "127.0.0.1"} if all_local else {}
    if uses_nccl:
        shared |= {"NCCL_HOST_IP": addresses[0], "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(len(hosts))}
    else:
        ring = [[f"{address}:{port}"] for address, port in zip(addresses, ports)]
        shared |= {"MLX_HOSTFILE": json.dumps(ring)}  # the contents; each process writes them to a file
    environments = []
    if uses_nccl and machines.count("localhost") > len(_visible_devices()):
        raise ValueError(
            f"hosts: got {machines.count('localhost')} processes for this machine, expected at most "
            f"{len(_visible_devices())}, the number of GPUs in CUDA_VISIBLE_DEVICES"
        )
    for rank, machine in enumerate(machines):
        index_on_host, on_host = machines[:rank].count(machine), machines.count(machine)
        environment = shared | {"MLX_RANK": str(rank)}
        if uses_nccl:
            environment["CUDA_VISIBLE_DEVICES"] = (
                _visible_devices()[index_on_host] if machine == "localhost" else str(index_on_host)
            )
        elif on_host > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, _processors() // on_host))
        environments.append(environment)
    if not uses_nccl:
        environments[0]["MLX_HOSTFILE"] = _write_hostfile(environments[0]["MLX_HOSTFILE"])
    return environments


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _uses_cuda(device: str | None) -> bool:
    """Whether programs run on an NVIDIA GPU. On Linux, MLX supports no other GPU."""
    library = ctypes.CDLL(load_engine())
    library.executorch_mlx_device.restype, library.executorch_mlx_device.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    chosen = library.executorch_mlx_device(None if device is None else device.encode())
    return sys.platform == "linux" and chosen == b"gpu"


def _visible_devices() -> list[str]:
    """Return the names of the GPUs in CUDA_VISIBLE_DEVICES. Without this variable, return the numbers 0 to 63."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(64)]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write_hostfile(content: str) -> str:
    file, name = tempfile.mkstemp(prefix="executorch-mlx-", suffix=".json")
    with open(file, "w") as hostfile:
        hostfile.write(content)
    atexit.register(lambda: Path(name).unlink(missing_ok=True))
    return name


def _start(host: str, environment: dict[str, str], arguments: Sequence[str]) -> subprocess.Popen:
    """Start this module on `host`. The new process ends when process 0 ends, even if process 0 is killed."""
    command = [sys.executable, "-m", "executorch_mlx.llm.processes", *arguments]
    if is_local(host):
        # A session of its own: Ctrl-C is for process 0. NCCL's set-up in MLX prints to stdout, which is for answers.
        return subprocess.Popen(
            command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    variables = [f"{name}={value}" for name, value in environment.items()]
    remote = f"cd {shlex.quote(os.getcwd())} && {shlex.join(['env', *variables, *command])}"
    return subprocess.Popen(
        ["ssh", "-o", "BatchMode=yes", host, remote], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def main() -> int:
    """Load a part, and make the calls of process 0 until it ends."""
    parser = argparse.ArgumentParser(prog="python -m executorch_mlx.llm.processes")
    parser.add_argument("path", type=Path)
    parser.add_argument("size", type=int)
    parser.add_argument("--device")
    parser.add_argument("--memory-limit", type=int)
    options = parser.parse_args()
    rank = rank_in_environment()
    if os.environ.get("MLX_HOSTFILE", "").startswith("["):
        os.environ["MLX_HOSTFILE"] = _write_hostfile(os.environ["MLX_HOSTFILE"])
    from .. import memory
    from .program import LLMProgram

    try:
        if options.memory_limit is not None:
            memory.set_memory_limit(options.memory_limit)
        LLMProgram(part_path(options.path, rank, options.size), device=options.device).follow()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"executorch-mlx: process {rank}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
