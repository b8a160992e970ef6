"""The Swift of the examples: its syntax, and what it does on Linux, where a Swift compiler is installed.

ExecuTorch's Swift module and Tokenizers exist for Apple systems only. The folders of the same names have stand-ins with
the part of their interfaces that the examples use. The one for ExecuTorch runs programs with its C++ runtime.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import small_llm
from compile_cpp import compile_cpp
from executorch_mlx.llm import LLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
IOS, MACOS = (ROOT / "examples" / name / "Sources" for name in ("ios", "macos"))
BUILD = Path(os.environ.get("EXECUTORCH_MLX_BUILD", ROOT / "build"))
HEADERS = [*(ROOT / "backends" / "mlx").glob("*/include/executorch_mlx/*.h")]
SOURCES = sorted([*(ROOT / "examples").rglob("*.swift"), *HERE.rglob("*.swift")])
BLOCKS = re.findall(r"^```swift\n(.*?)^```$", (ROOT / "docs" / "in-an-app.md").read_text(), re.MULTILINE | re.DOTALL)

needs_compiler = pytest.mark.skipif(shutil.which("swiftc") is None, reason="needs a Swift compiler")


def syntax_errors(node) -> list:
    if node.is_missing or node.type == "ERROR":
        return [node.start_point]
    return [error for child in node.children for error in syntax_errors(child)] if node.has_error else []


@pytest.fixture(scope="module")
def parse():
    """`parse(text)` returns the places of syntax errors."""
    tree_sitter = pytest.importorskip("tree_sitter")
    swift = pytest.importorskip("tree_sitter_swift")
    parser = tree_sitter.Parser(tree_sitter.Language(swift.language()))
    return lambda text: syntax_errors(parser.parse(text.encode()).root_node)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_syntax_of_a_file(parse, path):
    assert parse(path.read_text()) == []


def test_syntax_of_the_page(parse):
    assert BLOCKS and [parse(block) for block in BLOCKS] == [[]] * len(BLOCKS)
    assert parse("func f( { let x = }")


def swiftc(folder: Path, *arguments: str | Path) -> None:
    """Compile in `folder`, where modules and libraries are found."""
    paths = ["-I", folder, "-L", folder, "-L", BUILD]
    paths += [part for include in {path.parents[1] for path in HEADERS} for part in ("-Xcc", f"-I{include}")]
    rpaths = [part for path in (folder, BUILD) for part in ("-Xlinker", "-rpath", "-Xlinker", path)]
    linker = ["-Xlinker", "--unresolved-symbols=ignore-in-shared-libs"]  # the libraries of CUDA that libmlx may need
    command = ["swiftc", *arguments, *paths, *rpaths, *linker]
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning:" not in done.stderr, done.stderr


def module(folder: Path, name: str, *sources: Path, version: int = 6) -> None:
    options = ["-parse-as-library", "-emit-library", "-emit-module", "-swift-version", version, "-module-name", name]
    options += ["-module-link-name", name]
    swiftc(folder, *options, *sources, "-o", folder / f"lib{name}.so")


def lines(*command: object) -> list[str]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_compiler
def test_engine_in_swift(tmp_path, tmp_path_factory):
    """The wrapper of examples/macos gives the answer of the engine, and its functions do what the C API says."""
    headers = "\n".join(f'  header "{path}"' for path in HEADERS if path.name != "engine.h")
    libraries = '  link "mlx_llm_engine"\n  link "mlx_delegate"'
    text = f"module ExecutorchMLX {{\n{headers}\n{libraries}\n  export *\n}}\n"
    (tmp_path / "module.modulemap").write_text(text)
    module(tmp_path, "LanguageModel", MACOS / "LanguageModel" / "LanguageModel.swift")
    for source in (MACOS / "answer", HERE / "engine"):
        swiftc(tmp_path, source / "main.swift", "-o", tmp_path / source.name)
    path = small_llm.shared(tmp_path_factory, "swift-engine", batch=2, speculation=True)
    options = {"temperature": 0.8, "top_k": 40, "seed": 7, "max_new_tokens": 32}
    answer = LLM.load(path).generate([5, 17, 200], **options).result().text
    assert "\n".join(lines(tmp_path / "answer", path, "5,17,200")) == answer
    assert lines(tmp_path / "engine", path, "5,17,200")[:-1] == [
        "loaded 1.0",
        "ended 7",
        "cancelled 0",
        "resumed true",
        "loaded again true",
    ]


@needs_compiler
def test_portable_model_in_swift(tmp_path, tmp_path_factory):
    """The token loop of examples/ios draws the tokens that the engine draws, and reuses the caches. A conversation
    keeps whole turns."""
    from executorch_mlx.loader import load_delegate

    (tmp_path / "module.modulemap").write_text((HERE / "ExecuTorch" / "module.modulemap").read_text())
    shutil.copy(HERE / "ExecuTorch" / "shim.h", tmp_path)
    compile_shim(tmp_path / "libShim.so", Path(load_delegate()).parent)
    module(tmp_path, "ExecuTorch", HERE / "ExecuTorch" / "ExecuTorch.swift", version=5)
    module(tmp_path, "Tokenizers", HERE / "Tokenizers" / "Tokenizers.swift")
    module(tmp_path, "PortableModel", *sorted((IOS / "PortableModel").glob("*.swift")), version=5)
    for name in ("portable", "chat"):
        swiftc(tmp_path, HERE / name / "main.swift", "-o", tmp_path / name)

    path = small_llm.shared(tmp_path_factory, "swift-portable", portable=True)
    llm = LLM.load(path)
    long = [5, 17, 200, 3, 77] * 7  # three chunks
    prompts = [long, [*long, 9], long[:20], [*long[:20], 1, 2]]
    texts = [",".join(map(str, prompt)) for prompt in prompts]
    for temperature, top_k, seed in ((0, 0, 0), (0.9, 20, 11), (1, 0, 3)):
        printed = lines(tmp_path / "portable", path, temperature, top_k, seed, 12, *texts)
        options = {"temperature": temperature, "top_k": top_k, "seed": seed, "max_new_tokens": 12}
        expected = [llm.generate(prompt, **options).result().tokens for prompt in prompts]
        assert [line.split()[0] for line in printed] == [",".join(map(str, tokens)) for tokens in expected]
        assert [line.split()[1] for line in printed] == [
            "length" if len(tokens) == 12 else "stop" for tokens in expected
        ]
    full = ",".join(["5"] * small_llm.CONTEXT)  # leaves room for no other token
    assert lines(tmp_path / "portable", path, 0, 0, 0, 12, full)[0].split()[1] == "context"
    two = "user assistant user assistant"
    assert lines(tmp_path / "chat", path) == [f"{two} context", "true", two, two, "cancelled length"]


def compile_shim(library: Path, build: Path) -> None:
    import executorch.runtime

    wheel = Path(executorch.runtime.__file__).parents[1]
    include = wheel / "include"
    options = ["-fPIC", "-shared", "-DC10_USING_CUSTOM_GENERATED_MACROS", "-Wno-deprecated-declarations"]
    options += [f"-I{include}", f"-I{include / 'executorch/runtime/core/portable_type/c10'}"]
    options += [f"-I{ROOT / 'backends/mlx/runtime/include'}", f"-L{wheel / 'lib'}", f"-L{build}", "-Wl,--no-as-needed"]
    options += ["-lmlx_delegate", "-lexecutorch", "-lexecutorch_kernels_optimized"]
    options += [f"-Wl,-rpath,{wheel / 'lib'}:{build}"]
    compile_cpp(library, HERE / "ExecuTorch" / "shim.cpp", *options)
