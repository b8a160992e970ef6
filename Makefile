# make demo, make test: each first sets up .venv and build/ if needed.
.DEFAULT_GOAL := help
.PHONY: help demo demo-llm check format docs peers cuda-kernels test test-all test-suite test-ray test-arm64 build wheels sanitize fuzz-payloads fuzz-pte clean distclean same-python

VENV := .venv
PY   := $(VENV)/bin/python
N    ?= 2# test processes
ARGS ?=
PEERS ?= ctranslate2 llama_cpp mnn onnxruntime openvino

help:
	@echo "Start here: make demo. Or make build, then source .venv/bin/activate, then executorch-mlx doctor."
	@echo
	@echo "make build      set up .venv and build the delegate in build/"
	@echo "make demo       export the demo model and print text that mlx_llm_runner generates"
	@echo "make demo-llm   download SmolLM2-135M-Instruct as a GGUF file (93 MB), export it, and ask it a question"
	@echo "make check      check the style, the types and the imports, in a minute; make format applies the formatters"
	@echo "make test       also run the tests              [N=processes] [ARGS='-k sample -x']"
	@echo "make test-all   also run the tests that test/long_tests.py leaves out"
	@echo "make test-suite run ExecuTorch's backend test suite with this delegate and XNNPACK [N=processes]"
	@echo "make test-ray   install Ray and run the tests on a local Ray cluster, about five minutes [ARGS='-k serve']"
	@echo "make cuda-kernels"
	@echo "                compile all CUDA kernels with NVIDIA's run-time compiler, without a GPU; part of make test"
	@echo "make test-arm64 compile for Linux on arm64, and run op rows, engine and sampler under QEMU [N=processes]"
	@echo "make wheels     build the wheels for Linux on this processor and on arm64, and for macOS, in dist/"
	@echo "make sanitize   run the payload fuzzer, the runtime's and engine's tests and the op rows under ASan and UBSan,"
	@echo "                and the thread tests under TSan; needs Clang [COUNT=programs] [ROWS=family] [REPEAT=times]"
	@echo "make fuzz-payloads, fuzz-pte"
	@echo "                mutate payloads or .pte files in process; needs Clang [RUNS=mutations] [FUZZ_ARGS='-seed=1']"
	@echo "make peers      install engines for benchmarks/peers_cpu.py in build/peers; compiles llama.cpp"
	@echo "                [PEERS='ctranslate2 llama_cpp mnn onnxruntime openvino']"
	@echo "make docs       build the documentation in build/docs; a broken link is an error"
	@echo "make clean      remove build products; make distclean also removes .venv"
	@echo
	@echo "Variables of the first set-up of .venv and build/:"
	@echo "  PYTHON=python3.12    Python interpreter"
	@echo "  CXX=clang++          C++ compiler"
	@echo "  MLX=cuda13           backend of mlx on Linux: cpu, cuda12 or cuda13"
	@echo "  TORCH=torch==2.13.0  pip requirement for another build of torch"

demo: build
	@$(PY) examples/demo.py

demo-llm: build
	@$(PY) examples/demo_llm.py

# All but the generated header. `find` instead of git: an archive of the sources has no repository.
CPP := find backends benchmarks examples test ! -name output_fields.h \( -name '*.cpp' -o -name '*.h' -o -name '*.c' \)

# The checks that read the sources and run none of them. test_imports.py needs no fixture.
check: $(VENV)/.installed
	@$(VENV)/bin/ruff check --quiet
	@$(VENV)/bin/ruff format --check --quiet
	@$(CPP) | xargs $(VENV)/bin/clang-format --dry-run -Werror
	@$(PY) backends/mlx/serialization/generate.py --no-flatc
	@$(VENV)/bin/mypy --no-error-summary
	@$(PY) -m pytest --quiet --no-header --noconftest test/packaging/test_imports.py

format: $(VENV)/.installed
	@$(VENV)/bin/ruff check --quiet --fix --exit-zero
	@$(VENV)/bin/ruff format --quiet
	@$(CPP) | xargs $(VENV)/bin/clang-format -i

# The processes share the processors, so torch's threads of OpenMP sleep while they wait.
test: SHORT := --short
test test-all: check build
	@tools/setup.sh browser
	@tools/setup.sh speech
	@tools/setup.sh linker
	@tools/setup.sh arm64
	@tools/setup.sh nvrtc
	@OMP_WAIT_POLICY=passive $(PY) -m pytest -n $(N) --dist worksteal $(SHORT) $(ARGS) test

test-suite: build
	@$(PY) test/suite/run.py -n $(N) $(ARGS)

cuda-kernels: build
	@tools/setup.sh nvrtc
	@$(PY) -m pytest $(ARGS) test/cuda

test-ray: build $(VENV)/.ray
	@$(PY) -m pytest $(ARGS) test/cluster

$(VENV)/.ray: $(VENV)/.installed
	@EXECUTORCH_MLX_SKIP_CMAKE=1 $(PY) -m pip --disable-pip-version-check install -qq --no-build-isolation -e ".[ray]"
	@touch $@

# Tests of the engine that run mlx_llm_runner, and all op rows, with the programs for arm64.
test-arm64: build
	@tools/setup.sh arm64
	@$(PY) tools/linux_arm64/emulate.py
	@$(PY) -m pytest $(ARGS) test/arm64
	@EXECUTORCH_MLX_TEST_PROGRAMS=build/linux_arm64/emulated $(PY) -m pytest -n $(N) --dist worksteal $(ARGS) \
		$(addprefix test/engine/test_,engine_arguments.py engine_demo.py engine_generate.py engine_sampling.py engine_stop.py engine_text.py op_test_runner.py)
	@EXECUTORCH_MLX_TEST_PROGRAMS=build/linux_arm64/emulated $(PY) test/run_all_tests.py -j $(N)

# The engines are optional: the benchmark leaves out those that are not installed.
peers: build
	@set -e; for engine in $(PEERS); do tools/setup.sh peer $$engine; done
	@echo "Next: $(PY) benchmarks/peers_cpu.py"

# mkdocs runs without --quiet, which would also silence the warnings that --strict turns into errors.
docs: build
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "build/docs/index.html"

wheels: build
	@tools/setup.sh linker
	@tools/setup.sh arm64
	@$(PY) tools/wheels.py

export COUNT ROWS REPEAT RUNS FUZZ_ARGS TESTS
sanitize: build
	@N=$(N) tools/sanitize.sh address
	@N=$(N) tools/sanitize.sh thread

fuzz-payloads: build
	@tools/sanitize.sh payload

fuzz-pte: build
	@tools/sanitize.sh pte

# This recipe runs every time. Ninja then decides what to rebuild: it tracks the C++ sources and the CMake files.
build: build/.configured
	@$(PY) -m cmake --build build
ifneq (,$(filter build,$(MAKECMDGOALS)))
	@echo "The build is ready. Next: source $(VENV)/bin/activate, then executorch-mlx doctor"
endif

build/.configured: $(VENV)/.installed
	@tools/setup.sh native
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py $(PY)
	@tools/setup.sh install
	@touch $@

$(PY):
	@tools/setup.sh venv

# An explicit PYTHON must match an existing .venv.
ifdef PYTHON
$(VENV)/.installed: | same-python
same-python: $(PY)
	@tools/setup.sh same
endif

clean:
	rm -rf build dist *.egg-info .pytest_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
