"""Programs for Linux on arm64, run under QEMU: they give the text and the tokens of those for this machine."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from cpp_programs import BUILD
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.custom_kernel_ops.sample import sample
from oprows import tensor_file
from sampling_logits import logits_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "linux_arm64"))
import build_arm64_wheel  # noqa: E402
import emulate  # noqa: E402

ENGINE = ROOT / "backends/mlx/engine"
LIBRARIES = ("cpu_kernels", "delegate", "llm_engine", "scale_search")
FILES = ["bin/mlx_llm_runner", *(f"lib/libmlx_{name}.so" for name in LIBRARIES)]
PROMPT = "0,354,264"
SETTINGS = [
    ["--temperature=0"],
    ["--temperature=0.8", "--top-k=40", "--top-p=0.95", "--seed=7"],
    ["--temperature=1.5", "--seed=3"],
]

missing = emulate.missing_tool()
pytestmark = pytest.mark.skipif(missing is not None, reason=f"the programs for arm64 are not tested: {missing}")


@pytest.fixture(scope="module")
def build() -> Path:
    return build_arm64_wheel.build()


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    from executorch_mlx.llm.export import export_llm

    path = tmp_path_factory.mktemp("demo") / "demo.pte"
    export_llm(ROOT / "examples/demo_model", speculation=False, verify=False).save(path)
    return path


def test_wheel_contains_the_libraries_for_arm64(tmp_path):
    wheel = build_arm64_wheel.build_wheel(tmp_path)
    assert re.fullmatch(r"executorch_mlx-[\d.]+-py3-none-manylinux_2_\d+_aarch64\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        binaries = {n for n in archive.namelist() if n.endswith((".so", "/mlx_llm_runner"))}
        assert binaries == {f"executorch_mlx/{name}" for name in FILES}
        for name in binaries:
            assert archive.read(name)[:20].startswith(b"\x7fELF") and archive.read(name)[18] == 183  # EM_AARCH64


def output_of(command: list[object], **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=600, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("options", SETTINGS, ids=" ".join)
@pytest.mark.parametrize("instruction_set", ["i8mm", "dotprod", "portable"])
def test_text_of_the_demo_model(build, demo, instruction_set, options):
    arguments = [demo, f"--prompt-ids={PROMPT}", "--max-new-tokens=60", *options]
    expected = output_of([BUILD / "mlx_llm_runner", *arguments])
    runner = emulate.command(build / "mlx_llm_runner")
    assert output_of([*runner, *arguments], EXECUTORCH_MLX_CPU_KERNELS=instruction_set) == expected


@pytest.mark.parametrize("page_size", [1 << 14, 1 << 16])
def test_any_size_of_pages(build, demo, page_size):
    arguments = [demo, f"--prompt-ids={PROMPT}", "--max-new-tokens=60"]
    expected = output_of([BUILD / "mlx_llm_runner", *arguments])
    assert output_of([*emulate.command(build / "mlx_llm_runner", page_size), *arguments]) == expected


def test_example_in_c(build, demo, tmp_path):
    def answers(library: Path, compiler: str) -> Path:
        libraries = [library, "-Wl,--unresolved-symbols=ignore-in-shared-libs", f"-Wl,-rpath,{library.parent}"]
        options = ["-std=c11", f"-I{ENGINE}/include", ROOT / "examples/c/main.c", *libraries]
        output = tmp_path / compiler
        subprocess.run([compiler, *map(str, options), "-o", output], check=True)
        return output

    name = "libmlx_llm_engine.so"
    arguments = [demo, 20, PROMPT, "65,66", "97"]
    expected = output_of([answers(BUILD / name, "gcc"), *arguments])
    program = emulate.command(answers(build / name, "aarch64-linux-gnu-gcc"))
    assert output_of([*program, *arguments]) == expected


class Sample(torch.nn.Module):
    def forward(self, logits, temperature, top_p, seed, top_k, min_p):
        return sample(logits, temperature, top_p, seed, top_k=top_k, min_p=min_p)


def test_a_thousand_seeds(build, tmp_path):
    """The rows have other logits, parameters and seeds."""
    rows, vocabulary = 1000, 4003
    logits = torch.cat([logits_of(("text", "flat", "ties")[i % 3], 1, vocabulary, i) for i in range(rows)])
    row = torch.arange(rows)
    temperature = torch.tensor([0.0, 0.8, 1.3, 1.2, 1.0])[row % 5]
    top_p = torch.where(row % 5 == 3, 0.95, 1.0)
    top_k = torch.where(row % 5 == 2, 400, 0)
    min_p = torch.where(row % 5 == 4, 0.001, 0.0)
    inputs = (logits, temperature, top_p, row * 2654435761, top_k, min_p)
    exported = torch.export.export(Sample(), inputs)
    lowered = to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner(allow_extensions=True)])
    model = tmp_path / "model.pte"
    model.write_bytes(lowered.to_executorch().buffer)
    tensor_file.write_all(tmp_path / "inputs", inputs)
    runner = emulate.command(build / "op_test_runner")
    output_of([*runner, model, "--inputs", tmp_path / "inputs", "--outputs", tmp_path / "outputs"])
    (tokens,) = tensor_file.read_all(tmp_path / "outputs" / "0")
    expected = sample(inputs[0], *inputs[1:4], top_k=top_k, min_p=min_p)
    assert len(set(expected.tolist())) > 300
    assert torch.equal(tokens, expected)
