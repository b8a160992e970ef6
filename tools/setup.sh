#!/bin/sh
# The set-up behind the Makefile, from a machine with only Python, a C++20 compiler and make.
#
#   tools/setup.sh venv      create .venv               [PYTHON=python3.12]
#   tools/setup.sh install   the pins of pyproject.toml, and this package, editable
#                            [MLX=cpu|cuda12|cuda13]  [TORCH=<pip requirement>]
#   tools/setup.sh native    FlatBuffers, then configure and build the delegate in build/  [CXX=clang++]
#   tools/setup.sh same      does .venv have the version of $PYTHON?
#
# Each step stops with one line that says what is missing.
set -eu
cd "$(dirname "$0")/.."
venv=.venv
python=$venv/bin/python

say() { printf '%s\n' "[setup] $*"; }
die() { printf '%s\n' "[setup] $*" >&2; exit 1; }

# -- python ---------------------------------------------------------------------------------------

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || die "no Python: PYTHON=$PYTHON is not a program on this machine"
    supported "$PYTHON" || die "PYTHON=$PYTHON is Python $(version_of "$PYTHON" || echo '?'): 3.10 to 3.14 is needed"
    return
  fi
  for PYTHON in python3 python3.13 python3.12 python3.11 python3.10 python3.14; do
    if command -v "$PYTHON" >/dev/null && supported "$PYTHON"; then return; fi
  done
  command -v python3 >/dev/null || die "no Python: install Python 3.10 or newer, or name one with make PYTHON=<program>"
  die "python3 is Python $(version_of python3 || echo '?'): 3.10 to 3.14 is needed; name one with make PYTHON=<program>"
}

make_venv() {
  find_python
  check_compiler # now, not after minutes of downloads
  if ! "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then # Debian packages them apart
    package=python$(version_of "$PYTHON")-venv
    system_install "$package" >/dev/null 2>&1 ||
      die "$PYTHON has no venv module: install it (on Debian and Ubuntu: apt-get install $package)"
  fi
  say "creating $venv with Python $(version_of "$PYTHON")"
  "$PYTHON" -m venv "$venv" || { rm -rf "$venv"; die "$PYTHON -m venv $venv failed: see above"; }
}

same_python() {
  find_python
  [ "$(version_of "$PYTHON")" = "$(version_of "$python")" ] ||
    die "$venv is Python $(version_of "$python") and PYTHON=$PYTHON is $(version_of "$PYTHON"): run make distclean first"
}

# -- wheels ---------------------------------------------------------------------------------------

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

install_torch() {
  if [ -n "${TORCH:-}" ]; then
    pip install -qq "$TORCH" || die "pip could not install TORCH=$TORCH: see above"
    return
  fi
  version=$(sed -n 's/.*"torch==\([0-9.]*\)".*/\1/p' pyproject.toml)
  say "installing torch $version"
  if [ "$(uname -s)" = Darwin ]; then
    pip install -qq "torch==$version" || die "pip could not install torch $version: see above"
    return
  fi
  # PyPI's own build for Linux brings gigabytes of CUDA along. The CPU build comes from where pip
  # is configured to look, if it is there, and from PyTorch's index otherwise.
  pip install -qq "torch==$version+cpu" 2>/dev/null ||
    pip install -qq "torch==$version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
    die "pip could not install the CPU build of torch $version (see above); make TORCH=torch==$version takes PyPI's CUDA build"
}

install_package() {
  pip install -qq "setuptools>=77" || die "pip could not install setuptools: see above"
  install_torch
  say "installing executorch, mlx[${MLX:-cpu}] and what the tests need"
  # The compiler runs in the next step, in plain view and with the wheels in place.
  EXECUTORCH_MLX_SKIP_CMAKE=1 pip install -qq --no-build-isolation -e ".[${MLX:-cpu},dev]" ||
    die "pip could not install the requirements of pyproject.toml: see above"
  # For the example of JSON by a schema. Of what it asks for, triton is for its CUDA kernels alone.
  pip install -qq --no-deps "xgrammar==0.2.8" || die "pip could not install xgrammar: see above"
}

# -- C++ ------------------------------------------------------------------------------------------

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then sudo -n "$@"
  else return 1
  fi
}

system_install() {
  command -v apt-get >/dev/null || return 1
  DEBIAN_FRONTEND=noninteractive
  export DEBIAN_FRONTEND
  as_root apt-get install -y -q "$@" || { as_root apt-get update -q && as_root apt-get install -y -q "$@"; }
}

check_compiler() {
  compiler=
  for candidate in "${CXX:-}" c++ g++ clang++; do
    if [ -n "$candidate" ] && command -v "${candidate%% *}" >/dev/null; then compiler=$candidate; break; fi
  done
  if [ -n "${CXX:-}" ] && [ "$compiler" != "$CXX" ]; then die "no C++ compiler: CXX=$CXX is not a program on this machine"; fi
  [ -n "$compiler" ] ||
    die "no C++ compiler: install one that speaks C++20 (Debian and Ubuntu: apt-get install g++; macOS: xcode-select --install)"
  printf '#include <concepts>\n#include <span>\nint f(std::span<const int> s, std::integral auto i) { return s[i]; }\n' |
    $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    die "$compiler does not speak C++20: install GCC 11, Clang 14 or newer, or name one with make CXX=<program>"
}

get_flatbuffers() {
  if command -v flatc >/dev/null && echo '#include <flatbuffers/flatbuffers.h>' | $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
  then return; fi
  say "installing FlatBuffers"
  if system_install libflatbuffers-dev flatbuffers-compiler >/dev/null 2>&1; then return; fi
  if command -v brew >/dev/null && brew install --quiet flatbuffers; then return; fi
  say "no system package of FlatBuffers (that takes root or sudo without a password): CMake fetches its sources"
}

build_native() {
  check_compiler
  get_flatbuffers
  say "building the delegate"
  "$python" setup.py --quiet build_ext --inplace || die "the delegate did not build: see above"
}

case "${1:-}" in
  venv) make_venv ;;
  install) install_package ;;
  native) build_native ;;
  same) same_python ;;
  *) die "usage: tools/setup.sh venv | install | native | same" ;;
esac
