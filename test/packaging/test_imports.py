"""The import order of the package, low to high, read from the sources without running them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "backends" / "mlx"

# What each part may import of ours; a part always may import itself. A part that is not listed has
# no place in the house yet: give it one here and in CONTRIBUTING.md.
BELOW_OPS = {
    "serialization", "builder", "custom_ops", "custom_quant_ops", "official_ops", "packing",
}
RULES = {
    "serialization": set(),
    "custom_ops": set(),
    "packing": set(),
    "custom_quant_ops": {"custom_ops", "packing"},
    "official_ops": {"custom_ops", "packing"},
    "_load": set(),
    "return_types": set(),
    "builder": {"serialization", "packing"},
    "patterns": BELOW_OPS,
    "custom_kernel_ops": BELOW_OPS,
    "ops": BELOW_OPS | {"patterns", "custom_kernel_ops"},
    "preprocess": BELOW_OPS | {"ops"},
    "partitioner": BELOW_OPS | {"ops", "preprocess", "return_types"},
    "llm": {"custom_ops", "custom_quant_ops", "packing", "custom_kernel_ops", "_load", "partitioner"},  # never builder or ops
    "cli": {"serialization", "_load", "partitioner", "llm", "serve"},
    "serve": {"llm"},
    "__init__": {"_load", "llm", "partitioner", "preprocess"},
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


def imports(file: Path, text: str | None = None) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, module) of every import of ours, wherever in the file it stands."""
    package = module_of(file) if file.name == "__init__.py" else module_of(file)[:-1]
    for node in ast.walk(ast.parse(text if text is not None else file.read_text())):
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
            for alias in node.names:  # `from ..builder import dtypes` names a module, `from .slots import Slot` does not
                module = (*base, alias.name)
                yield node.lineno, module if exists(module) else base


def violations(file: Path, text: str | None = None) -> list[str]:
    importer = module_of(file)
    part = importer[0] if importer else "__init__"
    found = []
    for line, imported in imports(file, text):
        target = imported[0] if imported else "__init__"
        where = f"{file.relative_to(PACKAGE)}:{line}: {part} imports {'.'.join(imported) or 'the package itself'}"
        if target != part and target not in RULES[part]:
            found.append(f"{where}, which is not below it")
        family_to_family = part == target == "ops" and len(importer) > 1 and len(imported) > 1
        if family_to_family and imported != importer:
            found.append(f"{where}, a sibling family")
    return found


def test_every_part_has_a_place():
    parts = {(module_of(file) or ("__init__",))[0] for file in sources()}
    assert parts - RULES.keys() == set()


@pytest.mark.parametrize("file", sources(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_downwards(file):
    assert violations(file) == []


@pytest.mark.parametrize(
    "file, text",
    [
        ("serialization/pack.py", "from ..builder import slots"),
        ("builder/program.py", "from .. import ops"),
        ("builder/program.py", "def late():\n    from ..preprocess import MLXBackend"),
        ("patterns/rope.py", "from ..ops.shape import slice_"),
        ("ops/index.py", "from .shape import slice_"),
        ("ops/index.py", "from . import shape"),
        ("llm/sampling.py", "import executorch_mlx.builder.slots"),
        ("llm/sampling.py", "from executorch_mlx.ops import shape"),
        ("preprocess.py", "from . import MLXPartitioner"),
    ],
)
def test_an_import_upwards_or_sideways_is_seen(file, text):
    assert len(violations(PACKAGE / file, text)) == 1


def test_importing_ours_runs_nothing_at_the_bottom():
    """The wire can be read with no torch in sight: `serialization` imports neither torch nor executorch."""
    heavy = {"torch", "executorch", "mlx", "transformers"}
    for file in sorted((PACKAGE / "serialization").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert heavy.isdisjoint(name.split(".")[0] for name in names), f"{file.name}:{node.lineno}"
