"""Programs of ExecuTorch's own MLX delegate, run by ours, and its tests lowered by ours.

    python test/interop/official.py export DIR     exports the op tests of the installed package
    python test/interop/official.py run DIR        runs them through our runtime and compares
    python test/interop/official.py ours DIR       lowers the same models by our partitioner, and the same

`run` and `ours` tell how many were delegated as a whole: nothing is left on the host.

Its Python cannot be imported as it is installed: what its generate.py makes is missing. `export`
works on a private copy under DIR, in a process of its own, because its operators and ours have
the same names; `ours` starts from the exported programs that `export` has saved. `--every N` takes
every Nth configuration.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import torch


def private_copy(folder: Path) -> Path:
    """The installed executorch package, linked but for its backends/mlx, which is copied and
    completed by its own generator. Returns the folder to put on PYTHONPATH."""
    installed = Path(importlib.util.find_spec("executorch").submodule_search_locations[0])
    site = folder / "site"
    copy = site / "executorch"
    if copy.exists():
        return site
    (copy / "backends").mkdir(parents=True)
    for entry in installed.iterdir():
        if entry.name != "backends":
            (copy / entry.name).symlink_to(entry)
    for entry in (installed / "backends").iterdir():
        if entry.name != "mlx":
            (copy / "backends" / entry.name).symlink_to(entry)
    shutil.copytree(installed / "backends" / "mlx", copy / "backends" / "mlx")
    path = f"{installed / 'data' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # It ends with the C++ templates, which the wheel does not carry: what Python needs is there.
    subprocess.run(
        [sys.executable, copy / "backends" / "mlx" / "serialization" / "generate.py"],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(site)},
        capture_output=True,
        check=False,
    )
    return site


def export_all(folder: Path, every: int) -> None:
    """In the private copy's process: one folder for each configuration."""
    # The package's own __init__ wants torchtune, for modules that no op test uses.
    import executorch.extension.llm as llm

    modules = types.ModuleType(f"{llm.__name__}.modules")
    modules.__path__ = [str(Path(llm.__path__[0]) / "modules")]
    sys.modules[modules.__name__] = modules
    from executorch.backends.mlx.test import test_ops  # noqa: F401  (registers them)
    from executorch.backends.mlx.test.test_utils import get_all_test_configs

    tests = get_all_test_configs()[::every]
    for index, (name, test) in enumerate(tests):
        target = folder / "programs" / name
        target.mkdir(parents=True, exist_ok=True)
        if not (target / "exported.pt2").exists():
            save_exported(test, target / "exported.pt2")
        if (target / "done").exists():
            continue
        test.get_test_dir = lambda target=target: target
        try:
            test._set_seed()
            model, inputs = test.create_model().eval(), test.create_inputs()
            export_one(test, model, inputs, target / "model.pte")
            test._set_seed()
            inputs = test.create_test_inputs()
            with torch.no_grad():
                expected = test.compute_expected_outputs(model, inputs)
            torch.save(
                {
                    "inputs": list(inputs),
                    "expected": list(expected) if isinstance(expected, (tuple, list)) else [expected],
                    "rtol": test.rtol,
                    "atol": test.atol,
                },
                target / "data.pt",
            )
            (target / "done").touch()
        except Exception as error:  # noqa: BLE001  (its failures are its own, and counted)
            (target / "failed").write_text(f"{type(error).__name__}: {error}")
        if index % 20 == 0:
            print(f"{index} of {len(tests)}", flush=True)


def save_exported(test, path: Path) -> None:
    """The program before anybody's lowering."""
    test._set_seed()
    try:
        with torch.no_grad():  # torch.export.load fails on float8 that is part of a weight with a gradient
            model = test.create_model().eval()
        exported = torch.export.export(
            model,
            test.create_inputs(),
            dynamic_shapes=test.get_dynamic_shapes(),
            strict=True,
        )
        torch.export.save(exported, path)
    except Exception as error:  # noqa: BLE001  (torch's failures, counted as not saved)
        path.with_suffix(".failed").write_text(f"{type(error).__name__}: {error}")


def export_one(test, model, inputs, path: Path) -> None:
    from executorch.backends.mlx.test.test_utils import export_model_to_pte

    export_model_to_pte(
        model,
        inputs,
        path,
        dynamic_shapes=test.get_dynamic_shapes(),
        edge_compile_config=test.get_edge_compile_config(),
        transform_passes=test.get_transform_passes(),
    )


VERDICTS = {0: "correct", 3: "wrong", 4: "error", 5: "not lowered"}


def run_all(folder: Path, every: int, lower: bool) -> None:
    """Each program in a process of its own: a crash is a result too."""
    import executorch.runtime  # noqa: F401  (imported once, before the forks)
    import executorch_mlx  # noqa: F401

    results: Counter = Counter()
    whole = 0
    context = multiprocessing.get_context("fork")
    for target in sorted((folder / "programs").iterdir())[::every]:
        needed = ("exported.pt2", "data.pt") if lower else ("done",)
        if not all((target / name).exists() for name in needed):
            results["not exported"] += 1
            continue
        program = target / ("ours.pte" if lower else "model.pte")
        program.unlink(missing_ok=True) if lower else None
        process = context.Process(target=lambda: sys.exit(run_one(target, program, lower)))
        process.start()
        process.join()
        verdict = VERDICTS.get(process.exitcode, f"crash ({process.exitcode})")
        delegated = program.exists() and is_whole(program)
        whole += delegated and verdict == "correct"
        results[verdict] += 1
        if verdict != "correct" or not delegated:
            print(f"{verdict}{'' if delegated else ', in part'}: {target.name}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in results.most_common()))
    print(f"{whole} correct and delegated as a whole")


def is_whole(path: Path) -> bool:
    """Whether the program calls the delegate and nothing else."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    (plan,) = deserialize_pte_binary(path.read_bytes()).program.execution_plan
    return len(plan.delegates) == 1 and not plan.operators


def run_one(target: Path, program: Path, lower: bool) -> int:
    """0 if the outputs are those that were expected; `VERDICTS` has the others."""
    from executorch.runtime import Runtime
    from executorch_mlx import load_delegate

    load_delegate()
    data = torch.load(target / "data.pt", weights_only=False)
    if lower:
        try:
            lower_by_ours(target / "exported.pt2", program)
        except Exception as error:  # noqa: BLE001  (counted)
            print(f"{type(error).__name__}: {str(error)[:300]}")
            return 5
    try:
        loaded = Runtime.get().load_program(program)
        outputs = loaded.load_method("forward").execute(data["inputs"])
    except RuntimeError as error:
        print(error)
        return 4
    try:
        for actual, expected in zip(outputs, data["expected"], strict=True):
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(
                    actual, expected, rtol=data["rtol"], atol=data["atol"], equal_nan=True
                )
    except (AssertionError, ValueError) as error:
        print(str(error).strip().replace("\n", " "))
        return 3
    return 0


def lower_by_ours(source: Path, path: Path) -> None:
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from executorch.extension.llm import export  # noqa: F401  (defines its quantized formats)
    from executorch_mlx import MLXPartitioner

    partitioner = MLXPartitioner()
    config = EdgeCompileConfig(_check_ir_validity=False)
    manager = to_edge_transform_and_lower(
        torch.export.load(source), partitioner=[partitioner], compile_config=config
    )
    for refused in partitioner.explain().refused:
        print(f"{refused.target}: {refused.reason}")
    path.write_bytes(manager.to_executorch().buffer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["export", "export-here", "run", "ours"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.what == "export":
        site = private_copy(folder)
        command = [sys.executable, __file__, "export-here", folder, f"--every={options.every}"]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(site)}, check=True)
    elif options.what == "export-here":
        export_all(folder, options.every)
    else:
        run_all(folder, options.every, lower=options.what == "ours")


if __name__ == "__main__":
    main()
