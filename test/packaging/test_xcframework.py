"""ExecutorchMLX.xcframework, built on Linux: dyld can load its files, and Clang imports its headers as a module."""

import plistlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools" / "macos"))
import build_wheel  # noqa: E402
import build_xcframework  # noqa: E402
import macho  # noqa: E402

if sys.platform != "linux":
    pytest.skip("the framework is built on Linux", allow_module_level=True)
if missing := build_wheel.missing_tool():
    pytest.skip(f"no xcframework: {missing}", allow_module_level=True)

USE = """
@import ExecutorchMLX;

int load(const char* path) {
  executorch_mlx_model* model = 0;
  executorch_mlx_load_options options = executorch_mlx_default_load_options();
  executorch_mlx_request_options request = executorch_mlx_default_request_options();
  return executorch_mlx_register() + (int)executorch_mlx_get_active_memory() + (request.top_p == 1) +
      executorch_mlx_model_load(path, &options, &model);
}
"""


@pytest.fixture(scope="module")
def xcframework(tmp_path_factory) -> Path:
    return build_xcframework.build(tmp_path_factory.mktemp("xcframework"))


@pytest.fixture(scope="module")
def framework(xcframework) -> Path:
    (library,) = plistlib.loads((xcframework / "Info.plist").read_bytes())["AvailableLibraries"]
    assert (library["SupportedPlatform"], library["SupportedArchitectures"]) == ("macos", ["arm64"])
    assert (xcframework / library["LibraryIdentifier"] / library["BinaryPath"]).is_file()
    return xcframework / library["LibraryIdentifier"] / library["LibraryPath"]


def test_properties_name_the_binary(framework):
    properties = plistlib.loads((framework / "Resources" / "Info.plist").read_bytes())
    assert (framework / properties["CFBundleExecutable"]).is_file()
    assert properties["LSMinimumSystemVersion"] == "14.0"


def test_root_has_only_links_to_the_current_version(framework):
    """codesign refuses other contents."""
    assert all(path.is_symlink() for path in framework.iterdir() if path.name != "Versions")
    assert (framework / "Versions" / "Current").readlink() == Path("A")


def test_every_library_finds_the_others(framework):
    version = framework / "Versions" / "A"
    for path in [version / "ExecutorchMLX", *(version / "Libraries").glob("*.dylib")]:
        file = macho.read(path)
        for library in file.libraries:
            if library.startswith("@rpath/"):
                found = [
                    rpath.replace("@loader_path", str(path.parent)) + library.removeprefix("@rpath")
                    for rpath in file.rpaths
                ]
                assert any(Path(candidate).exists() for candidate in found), (path.name, library, file.rpaths)


def test_files_are_signed_for_macos_14(framework):
    version = framework / "Versions" / "A"
    for path in [version / "ExecutorchMLX", *(version / "Libraries").glob("lib*.dylib")]:
        assert macho.read(path).min_os <= (14, 0)
    for name in ("ExecutorchMLX", *(f"Libraries/{name}" for name in build_xcframework.EXPORTED)):
        assert macho.signature_errors(version / name) == []


def test_binary_stands_for_the_libraries(framework):
    file = macho.read(framework / "ExecutorchMLX")
    assert file.install_name == "@rpath/ExecutorchMLX.framework/Versions/A/ExecutorchMLX"
    assert {f"@rpath/{name}" for name in build_xcframework.EXPORTED} <= set(file.libraries)


def test_metal_kernels_lie_beside_the_library_of_mlx(framework):
    folder = framework / "Versions" / "A" / "Libraries"
    assert (folder / "libmlx.dylib").exists() and (folder / "mlx.metallib").stat().st_size > 1_000_000


@pytest.mark.parametrize("language", ["objective-c", "objective-c++"])
def test_headers_are_a_module(framework, tmp_path, monkeypatch, language):
    source = tmp_path / "use.m"
    source.write_text(USE)
    for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "zig"))
    command = [build_wheel.zig_folder() / "zig", "cc", "-target", "aarch64-macos.14.0", "-Werror", "-x", language]
    module = ["-fmodules", "-fcxx-modules", f"-fmodules-cache-path={tmp_path / 'modules'}", f"-F{framework.parent}"]
    done = subprocess.run([*command, *module, "-c", source, "-o", tmp_path / "use.o"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
