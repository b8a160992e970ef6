# make demo, make test: each sets up what it needs first, once.
.DEFAULT_GOAL := help
.PHONY: help demo test test-suite build clean distclean same-python

VENV := .venv
PY   := $(VENV)/bin/python
N    ?= 2# test processes
ARGS ?=

help:
	@echo "make demo       export the demo model and print text sampled by the C++ runner"
	@echo "make test       run the tests              [N=processes] [ARGS='-k sample -x']"
	@echo "make test-suite run ExecuTorch's backend test suite, ours beside XNNPACK [N=processes]"
	@echo "make build      set up .venv and build the delegate in build/"
	@echo "make clean      remove what was built; make distclean removes .venv too"
	@echo
	@echo "The first set-up of .venv and build/ listens to PYTHON=python3.12, CXX=clang++ (the C++"
	@echo "compiler), MLX=cuda13 (mlx's backend on Linux) and TORCH=torch==2.13.0 (another build of it)."

demo: build
	@$(PY) examples/demo.py

test: build
	@$(PY) -m pytest -n $(N) --dist worksteal $(ARGS) test

test-suite: build
	@$(PY) test/suite/run.py -n $(N) $(ARGS)

# Ninja knows the C++ sources and the CMake files.
build: build/.configured
	@$(PY) -m cmake --build build

build/.configured: $(VENV)/.installed
	@tools/setup.sh native
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py $(PY)
	@tools/setup.sh install
	@touch $@

$(PY):
	@tools/setup.sh venv

# A PYTHON that is asked for is what one gets.
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
