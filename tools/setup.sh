#!/bin/sh
# The set-up steps of the Makefile. They need Python, a C++20 compiler and make.
#
#   tools/setup.sh venv      create .venv                                     [PYTHON=python3.12]
#   tools/setup.sh install   install the requirements of pyproject.toml and this package, editable
#                            [MLX=cpu|cuda12|cuda13] [TORCH=<pip requirement>]
#   tools/setup.sh native    install FlatBuffers, then configure and build the delegate in build/  [CXX=clang++]
#   tools/setup.sh browser   install Chromium for the tests of the chat page; never fails
#   tools/setup.sh speech    install espeak-ng, which synthesises sound for the tests; never fails
#   tools/setup.sh linker    install LLVM's linker, for the macOS wheel that is built on Linux; never fails
#   tools/setup.sh arm64     install GCC for Linux on arm64, and QEMU, which runs its programs; never fails
#   tools/setup.sh nvrtc     install NVIDIA's run-time compiler in build/nvrtc, for the tests of the CUDA kernels; never
#                            fails
#   tools/setup.sh peer NAME install an engine that benchmarks/peers_cpu.py compares, in build/peers/NAME
#                            [TORCH=<pip requirement>]; names: ctranslate2, llama_cpp, mnn, onnxruntime, openvino
#   tools/setup.sh same      check that .venv has the version of $PYTHON
#
# A step that fails prints one line that names what is missing.
set -eu
cd "$(dirname "$0")/.."
venv=.venv
python=$venv/bin/python

say() { printf '%s\n' "[setup] $*"; }
die() { printf '%s\n' "[setup] $*" >&2; exit 1; }

# -- python ---------------------------------------------------------------------------------------

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || die "PYTHON=$PYTHON: program not found"
    supported "$PYTHON" || die "PYTHON=$PYTHON: got Python $(version_of "$PYTHON" || echo '?'), expected 3.11 to 3.14"
    return
  fi
  for PYTHON in python3 python3.13 python3.12 python3.11 python3.14; do
    if command -v "$PYTHON" >/dev/null && supported "$PYTHON"; then return; fi
  done
  command -v python3 >/dev/null || die "Python not found: install Python 3.11 or newer, or name one with make PYTHON=<program>"
  die "python3: got Python $(version_of python3 || echo '?'), expected 3.11 to 3.14; name one with make PYTHON=<program>"
}

make_venv() {
  find_python
  check_compiler # before the downloads, which take minutes
  if ! "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then # separate packages on Debian
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
    die "PYTHON=$PYTHON: got Python $(version_of "$PYTHON"), but $venv has $(version_of "$python"): run make distclean first"
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
  # PyPI's build for Linux requires gigabytes of CUDA libraries. Take the CPU build from the index that pip is
  # configured for, or else from PyTorch's index.
  pip install -qq "torch==$version+cpu" 2>/dev/null ||
    pip install -qq "torch==$version+cpu" --extra-index-url https://download.pytorch.org/whl/cpu ||
    die "pip could not install the CPU build of torch $version (see above); make TORCH=torch==$version installs PyPI's CUDA build"
}

install_package() {
  # pip 25.1 is the first that reads dependency groups.
  pip install -qq "setuptools>=77" "pip>=25.1" || die "pip could not install setuptools and pip: see above"
  install_torch
  say "installing executorch, mlx[${MLX:-cpu}] and the requirements of the tests"
  # The C++ build is the next step: it needs the wheels, and its output should be visible.
  EXECUTORCH_MLX_SKIP_CMAKE=1 pip install -qq --no-build-isolation -e ".[${MLX:-cpu},export,serve,speech]" --group dev ||
    die "pip could not install the requirements of pyproject.toml: see above"
  # For test/serve/test_serve_clients.py. In a separate command: pip cannot resolve all packages at once.
  pip install -qq "anthropic>=0.80" "langchain-openai>=1" "pydantic-ai-slim[openai]>=2" ||
    die "pip could not install API clients: see above"
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
  if [ -n "${CXX:-}" ] && [ "$compiler" != "$CXX" ]; then die "CXX=$CXX: program not found"; fi
  [ -n "$compiler" ] ||
    die "C++ compiler not found: install one that supports C++20 (Debian and Ubuntu: apt-get install g++; macOS: xcode-select --install)"
  printf '#include <concepts>\n#include <span>\nint f(std::span<const int> s, std::integral auto i) { return s[i]; }\n' |
    $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
    die "$compiler does not support C++20: install GCC 11, Clang 14 or newer, or name one with make CXX=<program>"
}

get_flatbuffers() {
  if command -v flatc >/dev/null && echo '#include <flatbuffers/flatbuffers.h>' | $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null
  then return; fi
  say "installing FlatBuffers"
  if system_install libflatbuffers-dev flatbuffers-compiler >/dev/null 2>&1; then return; fi
  if command -v brew >/dev/null && brew install --quiet flatbuffers; then return; fi
  say "cannot install FlatBuffers (needs apt-get with root or passwordless sudo, or brew): CMake downloads its sources"
}

build_native() {
  check_compiler
  get_flatbuffers
  say "building the delegate"
  "$python" setup.py --quiet build_ext --inplace || die "the build of the delegate failed: see above"
}

# -- browser --------------------------------------------------------------------------------------

has_browser() {
  command -v chromedriver >/dev/null || return 1
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null
}

# The tests of the chat page are skipped without a browser.
get_browser() {
  if has_browser; then return; fi
  if ! command -v apt-get >/dev/null || ! as_root true; then
    say "no Chromium with chromedriver, and no apt-get with root or passwordless sudo: the tests of the chat page are skipped"
    return
  fi
  say "installing Chromium for the tests of the chat page"
  if system_install --no-install-recommends chromium chromium-driver >/dev/null 2>&1 && has_browser; then return; fi
  say "apt-get cannot install chromium and chromium-driver: the tests of the chat page are skipped"
}

# -- speech ---------------------------------------------------------------------------------------

# A test of sound files is skipped without espeak-ng.
get_speech() {
  if command -v espeak-ng >/dev/null; then return; fi
  if command -v apt-get >/dev/null && as_root true; then
    say "installing espeak-ng for the tests of sound files"
    if system_install --no-install-recommends espeak-ng >/dev/null 2>&1; then return; fi
  fi
  say "cannot install espeak-ng (needs apt-get with root or passwordless sudo): a test of sound files is skipped"
}

# -- macOS wheel ----------------------------------------------------------------------------------

# Installs ld64.lld, LLVM's linker for macOS. Without it, tools/macos/build_wheel.py builds no wheel.
get_linker() {
  if [ "$(uname -s)" != Linux ] || "$python" tools/macos/build_wheel.py --has-linker; then return; fi
  if ! command -v apt-get >/dev/null || ! as_root true; then return; fi
  say "installing LLVM's linker for the macOS wheel"
  system_install --no-install-recommends lld-19 >/dev/null 2>&1 || say "apt-get cannot install lld-19"
}

# -- Linux on arm64 -------------------------------------------------------------------------------

# Without the compiler, tools/linux_arm64/build_arm64_wheel.py builds no wheel. The tests for arm64 need both.
get_arm64() {
  if [ "$(uname -s)" != Linux ] || [ "$(uname -m)" = aarch64 ]; then return; fi
  if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null; then return; fi
  if command -v apt-get >/dev/null && as_root true; then
    say "installing GCC and QEMU for Linux on arm64"
    if system_install --no-install-recommends g++-aarch64-linux-gnu qemu-user >/dev/null 2>&1; then return; fi
  fi
  say "cannot install g++-aarch64-linux-gnu and qemu-user (needs apt-get with root or passwordless sudo): no wheel for Linux on arm64, and its tests are skipped"
}

# -- CUDA kernels ---------------------------------------------------------------------------------

# The tests of the CUDA kernels are skipped without the compiler. They need no GPU.
get_nvrtc() {
  if [ "$(uname -s)" != Linux ] || [ -d build/nvrtc ]; then return; fi
  say "installing NVIDIA's run-time compiler for the tests of the CUDA kernels"
  pip install -qq --no-deps --target build/nvrtc "nvidia-cuda-nvrtc>=13,<14" || {
    rm -rf build/nvrtc
    say "pip cannot install nvidia-cuda-nvrtc: the tests of the CUDA kernels are skipped"
  }
}

# -- peers ----------------------------------------------------------------------------------------

# Each engine has a Python environment of its own, because their requirements contradict each other.
install_peer() {
  case "$1" in
    ctranslate2 | llama_cpp | mnn | onnxruntime | openvino) ;;
    *) die "peer $1: expected ctranslate2, llama_cpp, mnn, onnxruntime or openvino" ;;
  esac
  say "installing $1 in build/peers/$1"
  "$python" -m venv "build/peers/$1" || die "$python -m venv build/peers/$1 failed: see above"
  python=build/peers/$1/bin/python
  case "$1" in
    ctranslate2)
      install_torch
      add ctranslate2 transformers "torch==$(torch_version)"
      ;;
    llama_cpp) # compiled for this processor
      export CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"
      add --no-binary llama-cpp-python llama-cpp-python gguf
      ;;
    mnn)
      install_torch
      add MNN llmexport "torch==$(torch_version)"
      ;;
    onnxruntime)
      install_torch
      add onnxruntime-genai onnx onnx-ir transformers "torch==$(torch_version)"
      ;;
    openvino)
      install_torch
      add openvino-genai "optimum-intel[openvino]" "torch==$(torch_version)"
      # A requirement of optimum-intel for models of images. PyPI's build does not load beside the CPU build of torch.
      pip uninstall -q -y torchvision
      ;;
  esac
}

torch_version() { "$python" -c 'import importlib.metadata as m; print(m.version("torch"))'; }
add() { pip install -q "$@" || die "pip could not install $*: see above"; }

case "${1:-}" in
  venv) make_venv ;;
  install) install_package ;;
  native) build_native ;;
  browser) get_browser ;;
  speech) get_speech ;;
  linker) get_linker ;;
  arm64) get_arm64 ;;
  nvrtc) get_nvrtc ;;
  peer) install_peer "${2:-}" ;;
  same) same_python ;;
  *) die "usage: tools/setup.sh venv | install | native | browser | speech | linker | arm64 | nvrtc | peer NAME | same" ;;
esac
