# `make help` shows the commands. Each does its own set-up in .venv; later calls reuse it.

PYTHON ?= python3
VENV ?= .venv

# The PyTorch to install, as arguments of pip. On Linux the default carries CUDA, several gigabytes. The demo
# needs only a CPU build: point pip to the index of CPU builds that PyTorch's install page names, for example
#     make demo TORCH="torch==2.13.0 --index-url <that index>"
TORCH ?= torch==2.13.0

# More threads than one only slow a model as small as the bundled one down.
DEMO_THREADS ?= 1

# One request at a time, where a round is short of work and drafting pays most.
DEMO_ARGS ?= --compare --max-num-seqs 1 --num-speculative-tokens 2 --draft-loops 1 --max-tokens 96
BENCH_ARGS ?=
LOAD_ARGS ?=

# As many processes as cores; the tests of a file stay in one and in their order. 0 runs them all in this process.
TEST_PROCESSES ?= auto
TEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# An environment is usable if its Python runs and finds the packages of this folder; one that a stopped
# install, a removed interpreter or a moved folder left behind is made anew.
CHECK := import os, importlib.util as u; s = u.find_spec("looped_spec"); \
	print(s is not None and os.path.samefile(os.path.dirname(s.origin), "looped_spec"))
ifneq ($(shell $(BIN)/python -I -c '$(CHECK)' 2>/dev/null),True)
.PHONY: $(STAMP)
endif

.PHONY: help demo test lint bench report load setup clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-6s %s\n", $$1, $$2}' Makefile

demo: $(STAMP)  ## plain and speculative decoding side by side, on the bundled model
	OMP_NUM_THREADS=$(DEMO_THREADS) $(BIN)/python -m looped_spec generate demo:ouro \
		--prompt-file examples/prompts.jsonl $(DEMO_ARGS)

test: $(STAMP)  ## all tests; those that need a GPU are skipped without one
	$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --maxprocesses 8 --dist loadfile \
		--no-loadscope-reorder $(TEST_ARGS)

lint: $(STAMP)  ## ruff, mypy and the import contracts
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m mypy benchmarks .ci
	$(BIN)/lint-imports --no-logo --no-cache

bench: $(STAMP)  ## time the bundled model over draft lengths and depths, 2 to 5 minutes
	$(BIN)/python benchmarks/demo.py $(BENCH_ARGS)
	@echo; echo "The same model served to 64 clients, every answer checked, 20 minutes: make load"

report: $(STAMP)  ## draw docs/reports anew, from the bundled preset of a demo; installs matplotlib
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[plots]'
	$(BIN)/python presets/rebuild.py --report

load: $(STAMP)  ## put 64 clients at a server of the bundled model, with and without speculation, 20 minutes
	$(BIN)/python benchmarks/serve_load.py $(LOAD_ARGS)

setup: $(STAMP)  ## only make the environment

clean:  ## remove the environment and all caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Python compiles what it imports; to compile all of PyTorch and Transformers takes a minute or two.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@[ "`$(BIN)/python -I -c '$(CHECK)' 2>/dev/null`" = True ] || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
		--editable '.[ouro,huginn,nanbeige,serve,dev]'
	@touch $(STAMP)
