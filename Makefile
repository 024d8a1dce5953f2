# Set-up and checks. Needs Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A version that has a build for CPUs on the package index in use: without one, pip fetches gigabytes for GPUs.
TORCH ?= torch==2.13.0

# Exports are read back with the readers of Megatron-LM (make test), MosaicML (make test-all). These would
# pull in GPU packages, which reading does not need: so they are installed without their requirements, and with this.
READERS := brotli catalogue lightning-utilities pillow python-snappy requests tqdm zstd

# Tests start milldam some hundred times: without bytecode each start would compile it again.
unexport PYTHONDONTWRITEBYTECODE
# mkdocs-material's note on its successor: what it would replace has no hooks yet.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test test-all check docs install clean

demo: $(VENV)/installed
	$(BIN)/milldam demo

test: $(VENV)/installed-dev check
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal

test-all: $(VENV)/installed-peers check
	$(BIN)/pytest -n auto --maxprocesses 4 --dist worksteal -m "slow or not slow" --hypothesis-profile all

check: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict --quiet

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)" torchdata
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps megatron-core
	touch $@

$(VENV)/installed-docs: $(VENV)/installed-dev
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[docs]"
	touch $@

# The other readers, what the examples train with, and what builds the site.
$(VENV)/installed-peers: $(VENV)/installed-docs
	$(BIN)/pip install --quiet --disable-pip-version-check accelerate lightning jax $(READERS)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps mosaicml-streaming
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
