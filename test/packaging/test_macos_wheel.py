"""The macOS wheel, built on Linux: dyld can load its files beside the stock macOS wheels.

No Mac is needed: the tests read the files as dyld would. They are skipped if the machine lacks the tools of the build.
"""

import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "macos"))
import build_wheel  # noqa: E402
import macho  # noqa: E402
import stubs  # noqa: E402

DELEGATE, ENGINE, RUNNER = "lib/libmlx_delegate.dylib", "lib/libmlx_llm_engine.dylib", "bin/mlx_llm_runner"
FILES = [DELEGATE, ENGINE, RUNNER]

if sys.platform != "linux":
    pytest.skip("on a Mac, the other tests run the native build", allow_module_level=True)
if missing := build_wheel.missing_tool():
    pytest.skip(f"no macOS wheel: {missing}", allow_module_level=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel.build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A site-packages folder as on a Mac: our wheel, unpacked beside the macOS wheels of executorch and mlx."""
    site = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    for name in ("executorch", "mlx"):
        (site / name).symlink_to(build_wheel.SITE_PACKAGES / name)
    return site


def resolve(library: str, file: Path, rpaths: list[str]) -> Path | None:
    """The file that dyld loads for a library, or None for a library of the system."""
    if library in (stubs.LIBCXX, stubs.LIBSYSTEM):
        return None
    assert library.startswith("@rpath/"), library
    candidates = [rpath.replace("@loader_path", str(file.parent)) + library[len("@rpath") :] for rpath in rpaths]
    found = [path for path in map(Path, candidates) if path.exists()]
    assert found, f"{file.name}: {library} is in none of {rpaths}"
    return found[0]


def exported(library: str, path: Path | None) -> set[str]:
    if path is not None:
        return set(macho.read(path).exports)
    return stubs.symbols(build_wheel.STUBS / ("libc++.1.tbd" if library == stubs.LIBCXX else "libSystem.tbd"))


def test_wheel_is_for_macos_14_and_any_python(wheel):
    assert wheel.name.endswith("-py3-none-macosx_14_0_arm64.whl")


def test_wheel_contains_the_libraries_and_an_executable_runner(wheel):
    members = {item.filename: item for item in zipfile.ZipFile(wheel).infolist()}
    binaries = {name for name in members if name.endswith((".dylib", ".so")) or "/bin/" in name}
    assert binaries == {f"executorch_mlx/{name}" for name in FILES}
    assert members[f"executorch_mlx/{RUNNER}"].external_attr >> 16 & 0o111


@pytest.mark.parametrize("name", FILES)
def test_every_import_exists_in_its_library(site, name):
    path = site / "executorch_mlx" / name
    file = macho.read(path)
    assert len(file.imports) > 50
    exports = {library: exported(library, resolve(library, path, file.rpaths)) for library in file.libraries}
    missing = [each for each in file.imports if each.name not in exports.get(each.library, ())]
    assert not missing


@pytest.mark.parametrize("name", FILES)
def test_symbol_table_and_chained_imports_agree(site, name):
    file = macho.read(site / "executorch_mlx" / name)
    unused = {"dyld_stub_binder"}  # binds symbols at their first use, but chained imports are bound at load
    assert {each for each in file.symbol_imports if each.name not in unused} == set(file.imports)


def test_install_names_and_rpaths(site):
    delegate, engine, runner = (macho.read(site / "executorch_mlx" / name) for name in FILES)
    wheels = ["@loader_path/../../executorch/lib", "@loader_path/../../mlx/lib"]
    assert delegate.install_name == "@rpath/libmlx_delegate.dylib"
    assert engine.install_name == "@rpath/libmlx_llm_engine.dylib"
    assert delegate.rpaths == engine.rpaths == ["@loader_path", *wheels]
    assert runner.rpaths == ["@loader_path/../lib", *wheels]
    assert {"@rpath/libexecutorch.dylib", "@rpath/libmlx.dylib"} <= set(delegate.libraries)
    needed = ("libexecutorch", "libexecutorch_kernels_optimized", "libmlx_delegate")  # the kernels register themselves
    assert {f"@rpath/{name}.dylib" for name in needed} <= set(engine.libraries)
    assert {"@rpath/libmlx_llm_engine.dylib", "@rpath/libmlx_delegate.dylib"} <= set(runner.libraries)


@pytest.mark.parametrize("name", FILES)
def test_libraries_have_the_install_names_they_are_loaded_by(site, name):
    """dyld loads a library once for each install name. A second libexecutorch would have its own registry."""
    path = site / "executorch_mlx" / name
    file = macho.read(path)
    for library in file.libraries:
        if found := resolve(library, path, file.rpaths):
            assert macho.read(found).install_name == library


@pytest.mark.parametrize("name", FILES)
def test_oldest_macos_is_14(site, name):
    assert macho.read(site / "executorch_mlx" / name).min_os == (14, 0)


@pytest.mark.parametrize("name", FILES)
def test_signature_fits_the_file(site, name):
    assert macho.signature_errors(site / "executorch_mlx" / name) == []


def test_changed_file_does_not_fit_its_signature(site, tmp_path):
    data = bytearray((site / "executorch_mlx" / DELEGATE).read_bytes())
    data[len(data) // 2] ^= 1
    changed = tmp_path / "changed.dylib"
    changed.write_bytes(data)
    (error,) = macho.signature_errors(changed)
    assert "differs from its hash" in error


@pytest.mark.parametrize(
    ("name", "functions"),
    [(DELEGATE, ("register", "version", "buffers_copy")), (ENGINE, ("model_load", "engine_submit", "request_free"))],
)
def test_library_exports_only_its_c_functions(site, name, functions):
    exports = macho.read(site / "executorch_mlx" / name).exports
    assert {f"_executorch_mlx_{function}" for function in functions} <= exports.keys()
    assert all(name.startswith("_executorch_mlx_") for name in exports)


@pytest.mark.parametrize("name", FILES)
def test_no_symbol_is_merged_with_other_libraries(site, name):
    """dyld merges weak symbols of the same name, from all libraries of a process, into one definition.

    libmlx, and the MLX inside ExecuTorch's own delegate, define the same names as our files, but come from other
    versions and compilers.
    """
    weak = macho.MH_WEAK_DEFINES | macho.MH_BINDS_TO_WEAK
    file = macho.read(site / "executorch_mlx" / name)
    assert not file.flags & weak
    assert not any(flags & macho.EXPORT_SYMBOL_FLAGS_WEAK_DEFINITION for flags in file.exports.values())
    assert all(each.library for each in file.imports)
    official = macho.read(site / "executorch" / "lib" / "libexecutorch_backend_mlx.dylib")
    assert official.flags & weak, "the check is needless: the official delegate has no weak symbols"
