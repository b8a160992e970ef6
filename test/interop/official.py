"""Programs of ExecuTorch's own MLX delegate, run by ours.

    python test/interop/official.py export DIR     exports the op tests of the installed package
    python test/interop/official.py run DIR        runs them through our runtime and compares

Its Python cannot be imported as it is installed: what its generate.py makes is missing. `export`
works on a private copy under DIR, in a process of its own, because its operators and ours have
the same names. `--every N` takes every Nth configuration.
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
        if (target / "done").exists():
            continue
        target.mkdir(parents=True, exist_ok=True)
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


VERDICTS = {0: "correct", 3: "wrong", 4: "error"}


def run_all(folder: Path) -> None:
    """Each program in a process of its own: a crash is a result too."""
    import executorch.runtime  # noqa: F401  (imported once, before the forks)
    import executorch_mlx.partitioner  # noqa: F401

    results: Counter = Counter()
    context = multiprocessing.get_context("fork")
    for target in sorted((folder / "programs").iterdir()):
        if not (target / "done").exists():
            results["not exported"] += 1
            continue
        process = context.Process(target=lambda: sys.exit(run_one(target)))
        process.start()
        process.join()
        verdict = VERDICTS.get(process.exitcode, f"crash ({process.exitcode})")
        results[verdict] += 1
        if verdict != "correct":
            print(f"{verdict}: {target.name}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in results.most_common()))


def run_one(target: Path) -> int:
    """0 if the outputs are those that were expected, 3 if not, 4 if there was an error."""
    from executorch.runtime import Runtime
    from executorch_mlx import load_delegate

    load_delegate()
    data = torch.load(target / "data.pt", weights_only=False)
    try:
        program = Runtime.get().load_program(target / "model.pte")
        outputs = program.load_method("forward").execute(data["inputs"])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["export", "export-here", "run"])
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
        run_all(folder)


if __name__ == "__main__":
    main()
