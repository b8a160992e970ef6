"""Builds ExecutorchMLX.xcframework on Linux: the engine for macOS apps, with all libraries that it needs.

    python tools/macos/build_xcframework.py FOLDER    # → FOLDER/ExecutorchMLX.xcframework

The libraries are those of the macOS wheel, which this script builds first, and of the macOS wheels of executorch and
mlx. They stay as they are, signatures included. The framework's own binary exports the functions of the engine and the
delegate from them. MLX searches its Metal kernels beside its library, where Xcode accepts a file that is no code only
inside a framework.
"""

import argparse
import plistlib
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import build_wheel  # noqa: E402
import macho  # noqa: E402
from build_wheel import ROOT, SITE_PACKAGES, STUBS  # noqa: E402
from wheels import run  # noqa: E402

NAME = "ExecutorchMLX"
EXPORTED = ("libmlx_llm_engine.dylib", "libmlx_delegate.dylib")
IDENTIFIER = "org.executorch-mlx.ExecutorchMLX"


def build(folder: Path) -> Path:
    """Build the framework in `folder`, in place of an earlier one, and return its path."""
    result = folder / f"{NAME}.xcframework"
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary)
        zipfile.ZipFile(build_wheel.build_wheel(site)).extractall(site)
        for wheel in ("executorch", "mlx"):
            (site / wheel).symlink_to(SITE_PACKAGES / wheel)
        shutil.rmtree(result, ignore_errors=True)
        write_framework(site, result / "macos-arm64" / f"{NAME}.framework")
    library = {
        "LibraryIdentifier": "macos-arm64",
        "LibraryPath": f"{NAME}.framework",
        "BinaryPath": f"{NAME}.framework/Versions/A/{NAME}",
        "SupportedArchitectures": ["arm64"],
        "SupportedPlatform": "macos",
    }
    info = {"AvailableLibraries": [library], "CFBundlePackageType": "XFWK", "XCFrameworkFormatVersion": "1.0"}
    (result / "Info.plist").write_bytes(plistlib.dumps(info))
    return result


def write_framework(site: Path, framework: Path) -> None:
    """Write the framework from the wheels in `site`, in the layout that macOS requires."""
    version = framework / "Versions" / "A"
    for part in ("Headers", "Libraries", "Modules", "Resources"):
        (version / part).mkdir(parents=True)
    for library in libraries(site):
        shutil.copy2(library, version / "Libraries")
    shutil.copy2(site / "mlx" / "lib" / "mlx.metallib", version / "Libraries")
    headers = sorted((site / "executorch_mlx" / "include" / "executorch_mlx").glob("*.h"))
    for header in headers:  # in a framework, a header is included by the name of the framework
        text = header.read_text().replace("#include <executorch_mlx/", f"#include <{NAME}/")
        (version / "Headers" / header.name).write_text(text)
    (version / "Modules" / "module.modulemap").write_text(module_map([header.name for header in headers]))
    link_binary(version)
    (version / "Resources" / "Info.plist").write_bytes(plistlib.dumps(properties()))
    (framework / "Versions" / "Current").symlink_to("A")
    for name in (NAME, "Headers", "Modules", "Resources"):
        (framework / name).symlink_to(f"Versions/Current/{name}")


def libraries(site: Path) -> list[Path]:
    """Return the exported libraries and all that they need, directly or not, except those of the system."""
    folders = [site / package / "lib" for package in ("executorch_mlx", "executorch", "mlx")]
    found: dict[str, Path] = {}
    waiting = list(EXPORTED)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = next(folder / name for folder in folders if (folder / name).exists())
            waiting += [path.removeprefix("@rpath/") for path in macho.read(found[name]).libraries if "@rpath" in path]
    return [found[name] for name in sorted(found)]


def module_map(headers: list[str]) -> str:
    """Return the module map with which Clang and Swift import the C headers. engine.h is for C++."""
    lines = [f'  header "{name}"' for name in headers if name != "engine.h"]
    return "\n".join([f"framework module {NAME} {{", *lines, "  export *", "}", ""])


def link_binary(version: Path) -> None:
    """Link the binary of the framework, which contains no code: it exports what the libraries export."""
    exported = [part for name in EXPORTED for part in ("-reexport_library", version / "Libraries" / name)]
    run(
        [build_wheel.linker(), "-dylib", "-arch", "arm64", "-platform_version", "macos", "14.0", "14.0"]
        + ["-adhoc_codesign", "-install_name", f"@rpath/{NAME}.framework/Versions/A/{NAME}"]
        + ["-rpath", "@loader_path/Libraries", *exported, STUBS / "libSystem.tbd", "-o", version / NAME]
    )


def properties() -> dict[str, str | list[str]]:
    """Return the properties of the bundle."""
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    return {
        "CFBundleExecutable": NAME,
        "CFBundleIdentifier": IDENTIFIER,
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundleName": NAME,
        "CFBundlePackageType": "FMWK",
        "CFBundleShortVersionString": version,
        "CFBundleSupportedPlatforms": ["MacOSX"],
        "CFBundleVersion": version,
        "LSMinimumSystemVersion": "14.0",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if missing := build_wheel.missing_tool():
        sys.exit(f"[xcframework] {missing}")
    try:
        print(f"[xcframework] built {build(folder)}")
    except RuntimeError as error:
        sys.exit(f"[xcframework] {error}")


if __name__ == "__main__":
    main()
