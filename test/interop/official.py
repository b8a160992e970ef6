"""Run the op tests of ExecuTorch's own MLX delegate with this runtime and this partitioner.

    python test/interop/official.py export DIR     # export the tests with the official delegate
    python test/interop/official.py run DIR        # run the exported programs with this runtime, and compare
    python test/interop/official.py ours DIR       # lower the same models with this partitioner, run, and compare

`run` and `ours` print how many programs are correct, and how many of these are fully delegated. `--every N` takes
every Nth configuration.

The official delegate cannot be imported as it is installed, because the wheel lacks the Python files that the
delegate's generate.py writes. `export` therefore makes a complete copy of the delegate under DIR. The export runs in a
process of its own, because both delegates define operators of the same names. `ours` starts from the exported programs
that `export` saves.
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
    """Make a copy of the installed executorch package with a complete backends/mlx. All other folders are links.

    Returns the folder to put on PYTHONPATH.
    """
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
    # The generator writes the Python files first, and then fails because the wheel lacks its C++ templates.
    subprocess.run(
        [sys.executable, copy / "backends" / "mlx" / "serialization" / "generate.py"],
        env=os.environ | {"PATH": path, "PYTHONPATH": str(site)},
        capture_output=True,
        check=False,
    )
    return site


def export_all(folder: Path, every: int) -> None:
    """Export each configuration to a folder of its own. Runs in the process that imports the private copy."""
    # The __init__ of extension.llm.modules imports torchtune, which no op test needs. An empty package replaces it.
    import executorch.extension.llm as llm

    modules = types.ModuleType(f"{llm.__name__}.modules")
    modules.__path__ = [str(Path(llm.__path__[0]) / "modules")]
    sys.modules[modules.__name__] = modules
    from executorch.backends.mlx.test import test_ops  # noqa: F401  (registers the tests)
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
        except Exception as error:
            (target / "failed").write_text(f"{type(error).__name__}: {error}")
        if index % 20 == 0:
            print(f"exported {index} of {len(tests)}", flush=True)


def save_exported(test, path: Path) -> None:
    """Save the exported program before it is lowered."""
    test._set_seed()
    try:
        with torch.no_grad():  # torch.export.load fails on float8 weights that require a gradient
            model = test.create_model().eval()
        exported = torch.export.export(
            model, test.create_inputs(), dynamic_shapes=test.get_dynamic_shapes(), strict=True
        )
        torch.export.save(exported, path)
    except Exception as error:
        path.with_suffix(".failed").write_text(f"{type(error).__name__}: {error}")


def export_one(test, model, inputs, path: Path) -> None:
    """Export and lower with the official delegate."""
    from executorch.backends.mlx.test.test_utils import export_model_to_pte

    export_model_to_pte(
        model,
        inputs,
        path,
        dynamic_shapes=test.get_dynamic_shapes(),
        edge_compile_config=test.get_edge_compile_config(),
        transform_passes=test.get_transform_passes(),
    )


# Exit codes of the process that runs a program.
VERDICTS = {0: "correct", 3: "wrong", 4: "error", 5: "not lowered"}


def run_all(folder: Path, every: int, lower: bool) -> None:
    """Run each program in a process of its own, so that a crash counts as a result. Print the results.

    With `lower`, the programs are lowered with this partitioner. Without it, they are those of the official delegate.
    """
    import executorch.exir  # noqa: F401  (imported once, before the forks)

    results: Counter = Counter()
    fully_delegated = 0
    context = multiprocessing.get_context("fork")
    targets = sorted((folder / "programs").glob("*"))[::every]
    if not targets:
        raise SystemExit(f"official.py: {folder} has no programs; run `official.py export {folder}` first")
    for target in targets:
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
        delegated = program.exists() and is_fully_delegated(program)
        fully_delegated += delegated and verdict == "correct"
        results[verdict] += 1
        if verdict != "correct" or not delegated:
            print(f"{verdict}{'' if delegated else ', not fully delegated'}: {target.name}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in results.most_common()))
    print(f"{fully_delegated} correct and fully delegated")


def is_fully_delegated(path: Path) -> bool:
    """Whether the program consists of one delegate call."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    (plan,) = deserialize_pte_binary(path.read_bytes()).program.execution_plan
    return len(plan.delegates) == 1 and not plan.operators


def run_one(target: Path, program: Path, lower: bool) -> int:
    """Run a program and compare its outputs. Returns a key of `VERDICTS`."""
    from executorch_mlx import Runtime

    data = torch.load(target / "data.pt", weights_only=False)
    if lower:
        try:
            lower_with_ours(target / "exported.pt2", program)
        except Exception as error:
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
                torch.testing.assert_close(actual, expected, rtol=data["rtol"], atol=data["atol"], equal_nan=True)
    except (AssertionError, ValueError) as error:
        print(str(error).strip().replace("\n", " "))
        return 3
    return 0


def lower_with_ours(source: Path, path: Path) -> None:
    """Lower a saved exported program with `MLXPartitioner`, and print what is not delegated."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
    from executorch.extension.llm import export  # noqa: F401  (defines operators of quantized formats)
    from executorch_mlx import MLXPartitioner

    partitioner = MLXPartitioner()
    config = EdgeCompileConfig(_check_ir_validity=False)
    manager = to_edge_transform_and_lower(torch.export.load(source), partitioner=[partitioner], compile_config=config)
    for refused in partitioner.explain().refused:
        print(f"{refused.target}: {refused.reason}")
    path.write_bytes(manager.to_executorch().buffer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    # "export-here" is what "export" runs in the process that imports the private copy.
    parser.add_argument("command", choices=["export", "export-here", "run", "ours"])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth configuration")
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.command == "export":
        site = private_copy(folder)
        process = [sys.executable, __file__, "export-here", folder, f"--every={options.every}"]
        subprocess.run(process, env=os.environ | {"PYTHONPATH": str(site)}, check=True)
    elif options.command == "export-here":
        export_all(folder, options.every)
    else:
        run_all(folder, options.every, lower=options.command == "ours")


if __name__ == "__main__":
    main()
