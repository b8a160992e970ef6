"""The import order of the package, from low to high, read from the sources without running them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "backends" / "mlx"

BELOW_OPS = {"serialization", "extents", "builder", "custom_ops", "workarounds"}
# Part → the parts that it may import, besides itself. Add new parts here and in CONTRIBUTING.md.
RULES = {
    "serialization": set(),
    "custom_ops": set(),
    "extents": set(),
    "workarounds": {"custom_ops", "extents"},
    "legalize": {"extents"},
    "loader": set(),
    "programs": {"loader", "weights_file", "workarounds"},
    "bindings": {"loader", "programs"},
    "quiet": set(),
    "lazy_names": {"quiet"},
    "collector": set(),
    "gpu_kernels": {"loader"},
    "memory": {"loader"},
    "state": {"loader"},
    "builder": {"serialization", "extents", "custom_ops", "workarounds"},
    "patterns": BELOW_OPS | {"ops"},  # only ops.lib
    "custom_kernel_ops": BELOW_OPS,
    "random": {"custom_ops"},
    "ops": BELOW_OPS | {"custom_kernel_ops", "random"},
    "buffers": {"builder"},
    "preprocess": BELOW_OPS | {"buffers", "ops", "patterns", "weights_file"},
    "partitioner": BELOW_OPS | {"buffers", "legalize", "ops", "patterns", "preprocess", "weights_file"},
    "inspect": {"serialization"},
    "file_regions": {"inspect"},
    "weights_file": {"file_regions"},
    "verification": {
        "bindings",
        "builder",
        "file_regions",
        "inspect",
        "partitioner",
        "quiet",
        "serialization",
        "workarounds",
    },
    # never builder or ops
    "llm": {
        "bindings",
        "collector",
        "custom_ops",
        "custom_kernel_ops",
        "extents",
        "lazy_names",
        "loader",
        "memory",
        "partitioner",
        "preprocess",
        "quiet",
        "training",
        "verification",
        "weights_file",
        "workarounds",
    },
    "training": {
        "bindings",
        "collector",
        "custom_ops",
        "lazy_names",
        "llm",
        "partitioner",
        "quiet",
        "random",
        "weights_file",
    },
    "speech": {"llm"},  # a public name of llm.speech
    "encoders": {"collector", "lazy_names", "llm", "partitioner", "quiet", "verification", "workarounds"},
    "batch": set(),
    "serve": {"batch", "encoders", "lazy_names", "llm", "memory"},
    "ray": {"batch", "encoders", "llm", "memory", "serve"},
    "cli": {
        "batch",
        "collector",
        "encoders",
        "gpu_kernels",
        "inspect",
        "loader",
        "memory",
        "partitioner",
        "llm",
        "quiet",
        "ray",
        "serve",
        "training",
        "weights_file",
    },
    "__main__": {"cli"},
    "__init__": {
        "encoders",
        "gpu_kernels",
        "loader",
        "llm",
        "memory",
        "partitioner",
        "preprocess",
        "programs",
        "quiet",
        "state",
        "verification",
        "weights_file",
        "workarounds",
    },
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(file: Path) -> tuple[str, ...]:
    """`builder/slots.py` → ("builder", "slots"); `builder/__init__.py` → ("builder",)."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def exists(module: tuple[str, ...]) -> bool:
    path = PACKAGE.joinpath(*module)
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(file: Path, source: str | None = None) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The line and the module of every import from this package, also of imports inside functions."""
    package = module_of(file) if file.name == "__init__.py" else module_of(file)[:-1]
    for node in ast.walk(ast.parse(source if source is not None else file.read_text())):
        if isinstance(node, ast.Import):
            named = [tuple(alias.name.split(".")) for alias in node.names]
            yield from ((node.lineno, name[1:]) for name in named if name[0] == "executorch_mlx")
        elif isinstance(node, ast.ImportFrom):
            stem = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - (node.level - 1)] + stem
            elif stem[0] == "executorch_mlx":
                base = stem[1:]
            else:
                continue
            for alias in node.names:  # a module (`from ..builder import dtypes`), or something in the module `base`
                module = (*base, alias.name)
                yield node.lineno, module if exists(module) else base


def violations(file: Path, source: str | None = None) -> list[str]:
    importer = module_of(file)
    part = importer[0] if importer else "__init__"
    found = []
    for line, imported in imports(file, source):
        target = imported[0] if imported else "__init__"
        where = f"{file.relative_to(PACKAGE)}:{line}: {part} imports {'.'.join(imported) or 'the package itself'}"
        if target != part and target not in RULES[part]:
            found.append(f"{where}, which RULES does not permit")
        is_in_lib = imported[:2] == ("ops", "lib")
        if target == "ops" and part in ("ops", "patterns") and importer != ("ops",) and not is_in_lib:
            found.append(f"{where}, another family")
    return found


# From low to high: a file of `llm` imports only files of its own layer and of those before it.
LLM_LAYERS = (
    {"llm.export.packed", "llm.export.precision", "llm.export.quantize", "llm.export.gguf", "llm.export.experts"},
    {"llm.export.checkpoints"},
    {"llm.export.weights", "llm.export.survey", "llm.export.export"},
    {"llm.speech.export"},
)


def llm_layer(module: tuple[str, ...]) -> int | None:
    """Return the index of the layer that has `module`, or None if no layer lists it."""
    names = {".".join(module[:length]) for length in range(1, len(module) + 1)}
    return next((index for index, layer in enumerate(LLM_LAYERS) if names & layer), None)


# The folders of the runtime from low to high. A file includes only files of its own folder and of those before it. The
# files beside the folders belong to no layer.
RUNTIME_LAYERS = ("kernels", "mlx_internals", "memory", "gpu", "program", "call", "ops", "fusion")


def runtime_includes(file: Path, source: str) -> list[str]:
    """The includes of a file of the runtime that point to a higher layer."""
    layer = RUNTIME_LAYERS.index(file.relative_to(PACKAGE / "runtime").parts[0])
    included = re.findall(r'^#include "(\w+)/', source, re.MULTILINE)
    return [name for name in included if name in RUNTIME_LAYERS[layer + 1 :]]


def test_includes_of_the_runtime_point_one_way():
    files = [file for file in (PACKAGE / "runtime").rglob("*") if file.suffix in (".h", ".cpp", ".inc")]
    in_layers = [file for file in files if file.relative_to(PACKAGE / "runtime").parts[0] in RUNTIME_LAYERS]
    found = {str(file): runtime_includes(file, file.read_text()) for file in in_layers}
    assert {file: names for file, names in found.items() if names} == {}
    assert runtime_includes(PACKAGE / "runtime" / "memory" / "x.h", '#include "ops/op.h"\n') == ["ops"]


def test_every_part_has_a_rule():
    parts = {(module_of(file) or ("__init__",))[0] for file in sources()}
    assert parts == RULES.keys()


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_follow_the_rules(file):
    assert violations(file) == []


@pytest.mark.parametrize("file", sorted((PACKAGE / "llm").rglob("*.py")), ids=lambda f: str(f.relative_to(PACKAGE)))
def test_checkpoints_become_models_one_way(file):
    layer = llm_layer(module_of(file))
    if layer is not None:
        above = [m for _, m in imports(file) if (other := llm_layer(m)) is not None and other > layer]
        assert above == []


def circles(graph: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Return the modules of `graph`, module → the modules that it imports, that import themselves through others."""

    def reaches(start: tuple[str, ...]) -> bool:
        seen, queue = set(), list(graph[start])
        while queue:
            if (module := queue.pop()) == start:
                return True
            if module not in seen:
                seen.add(module)
                queue += graph.get(module, ())
        return False

    return [module for module in graph if reaches(module)]


def test_no_files_import_each_other():
    assert circles({module_of(file): {m for _, m in imports(file)} - {module_of(file)} for file in sources()}) == []
    assert circles({("a",): {("b",)}, ("b",): {("a",)}, ("c",): {("a",)}}) == [("a",), ("b",)]


def test_patterns_read_arguments_by_name():
    """As docs/write-a-pattern.md says: `node.args` says nothing about the arguments that a pattern does not expect."""
    for file in (PACKAGE / "patterns").glob("*.py"):
        read = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        assert not [f"{file}:{node.lineno}" for node in read if node.attr in ("args", "kwargs")]


def test_scripts_import_modules_that_exist():
    for folder in ("benchmarks", "examples", "tools"):
        for file in (PACKAGE.parents[1] / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("executorch_mlx."):
                    assert exists(tuple(node.module.split(".")[1:])), f"{file}:{node.lineno}: {node.module}"


@pytest.mark.parametrize(
    "file, source",
    [
        ("serialization/pack.py", "from ..builder import slots"),
        ("builder/program.py", "from .. import ops"),
        ("builder/program.py", "def late():\n    from ..preprocess import MLXBackend"),
        ("patterns/rope.py", "from ..ops.shape import slice_"),
        ("ops/index.py", "from .shape import slice_"),
        ("ops/index.py", "from . import shape"),
        ("ops/lib/scan.py", "from ..shape import slice_"),
        ("patterns/rope.py", "from ..ops import shape"),
        ("llm/sampling_head.py", "import executorch_mlx.builder.slots"),
        ("llm/sampling_head.py", "from executorch_mlx.ops import shape"),
        ("preprocess.py", "from . import MLXPartitioner"),
    ],
)
def test_violation_is_found(file, source):
    assert len(violations(PACKAGE / file, source)) == 1


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_module_imports_the_code_generator(file):
    if file != PACKAGE / "serialization" / "generate.py":
        assert ("serialization", "generate") not in [module[:2] for _, module in imports(file)]


def test_serialization_needs_no_torch():
    """Tools can read the IR without torch or ExecuTorch."""
    heavy = {"torch", "executorch", "mlx", "transformers"}
    files = sorted((PACKAGE / "serialization").rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert heavy.isdisjoint(name.split(".")[0] for name in names), f"{file.name}:{node.lineno}"
