"""The CPU kernels for arm64, cross-compiled and run under QEMU, beside those of this machine.

`make test-arm64` also runs whole programs.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from compile_cpp import compile_cpp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "linux_arm64"))
import build_arm64_wheel  # noqa: E402
import emulate  # noqa: E402

SOURCE = Path(__file__).with_name("run_cpu_kernels.cpp")
KERNELS = ROOT / "backends/mlx/runtime/kernels/cpu"
# As in the CMakeLists.txt of the kernels.
INSTRUCTION_SETS = {
    "i8mm": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
    "dotprod": ["-march=armv8.2-a+dotprod"],
    "portable": [],
}

missing = emulate.missing_tool()
pytestmark = pytest.mark.skipif(missing is not None, reason=f"the kernels for arm64 are not tested: {missing}")


class Results:
    """What run_cpu_kernels prints."""

    def __init__(self, command: list[str]):
        lines = subprocess.check_output(command, text=True).splitlines()
        self.products, self.tokens = {}, {}  # by instruction set
        for line in lines:
            instruction_set, name, *values = line.split()
            if name == "tokens":
                self.tokens[instruction_set] = values
            else:
                self.products.setdefault(instruction_set, {})[name] = values


def compile_program(folder: Path, *options: str | Path, compiler: str | None = None) -> Path:
    return compile_cpp(folder / "run_cpu_kernels", "-O1", f"-I{KERNELS}", SOURCE, *options, compiler=compiler)


def compile_objects(folder: Path, sources: Iterable[Path], *options: str) -> list[Path]:
    """Compile the kernels for arm64. Not by CMake, whose build takes longer because it optimizes more."""
    options = ("-O1", "-fPIC", "-ffp-contract=off", "-Wno-psabi", f"-I{KERNELS}", *options)
    objects = []
    for source in sources:
        output = folder / f"{source.stem}.o"
        objects.append(compile_cpp(output, *options, "-c", source, compiler=build_arm64_wheel.COMPILER))
    return objects


@pytest.fixture(scope="module")
def arm64(tmp_path_factory) -> Results:
    folder = tmp_path_factory.mktemp("arm64")
    sources = [*KERNELS.glob("*.cpp"), KERNELS / "simd/select_kernels.cpp"]
    objects = compile_objects(folder, sources, "-DEXECUTORCH_MLX_ARM_KERNELS=1")
    for name, flags in INSTRUCTION_SETS.items():
        (folder / name).mkdir()
        inner_loops = [KERNELS / "simd/kernels.cpp"]
        objects += compile_objects(folder / name, inner_loops, f"-DEXECUTORCH_MLX_ISA={name}", *flags)
    program = compile_program(folder, *objects, "-pthread", "-ldl", compiler=build_arm64_wheel.COMPILER)
    return Results(emulate.command(program))


@pytest.fixture(scope="module")
def native(delegate, tmp_path_factory) -> Results:
    library = Path(delegate).parent / "libmlx_cpu_kernels.so"
    program = compile_program(tmp_path_factory.mktemp("native"), library, f"-Wl,-rpath,{library.parent}")
    return Results([str(program)])


def test_every_instruction_set_runs(arm64):
    assert list(arm64.products) == list(arm64.tokens) == list(INSTRUCTION_SETS)


def test_rows_have_the_same_bits_alone_and_among_others(arm64):
    wrong = [(s, name) for s, products in arm64.products.items() for name, p in products.items() if p[1] != "1"]
    assert not wrong


def test_products_are_near_those_in_double_precision(arm64):
    wrong = [(s, name) for s, products in arm64.products.items() for name, p in products.items() if p[2] != "1"]
    assert not wrong


def test_products_of_integers_have_the_bits_of_other_processors(arm64, native):
    (expected, *others) = [*native.products.values(), *arm64.products.values()]
    names = [name for name in expected if "integers" in name]
    assert len(names) > 20
    for products in others:
        assert {name: products[name][0] for name in names} == {name: expected[name][0] for name in names}


def test_a_thousand_seeds_draw_the_tokens_of_other_processors(arm64, native):
    (expected, *others) = [*native.tokens.values(), *arm64.tokens.values()]
    assert len(expected) == 1000 and len(set(expected)) > 100
    assert all(tokens == expected for tokens in others)
