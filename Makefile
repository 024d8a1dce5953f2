# Set-up and checks. Needs Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A version that has a build for CPUs on the package index in use: without one, pip fetches gigabytes for GPUs.
TORCH ?= torch==2.13.0

.PHONY: demo test test-slow check install clean

demo: $(VENV)/installed
	$(BIN)/milldam demo

test: $(VENV)/installed-dev check
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

test-slow: $(VENV)/installed-peers
	$(BIN)/pytest -m slow

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)" torchdata
	touch $@

# The packages whose files and readers we share, and those that the examples train with. megatron-core would pull in
# GPU packages; its reader needs none.
$(VENV)/installed-peers: $(VENV)/installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check packaging transformers accelerate lightning jax
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps megatron-core
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
