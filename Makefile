# `make serve` runs the main job, `make test` all tests. Each installs what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' -)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: test check fix lint docs lock clean venv bench-nvme bench-object

test: lint
	$(BIN)/pytest -m "not vllm and not gpu"
	@# What needs vLLM runs where `make serve` has installed it, in a virtual environment of its own.
	@if [ -x .venv-vllm/bin/pytest ]; then .venv-vllm/bin/pytest -m "vllm and not gpu"; fi
	@if [ -x .venv-vllm/bin/pytest ] && nvidia-smi >/dev/null 2>&1; then \
		.venv-vllm/bin/pytest -m gpu; fi

# The quick part of `make test`, for every change.
check: lint
	$(BIN)/pytest -m "not slow and not vllm and not gpu"

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

fix: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What is made from the types, and tested to be fresh.
docs: $(STAMP)
	$(BIN)/kvtier config schema --built-in > $(VENV)/made && mv $(VENV)/made configs/schema.json
	$(BIN)/kvtier config reference --built-in > $(VENV)/made && mv $(VENV)/made docs/CONFIGURATION.md

bench-nvme bench-object: bench-%: $(STAMP)
	$(BIN)/python -m benchmarks.$*

# The versions that `make test` installs: the newest that pyproject.toml allows, today.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet '.[dev]'
	.venv-lock/bin/pip freeze --exclude kvtier > constraints.txt
	rm -rf .venv-lock

venv: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"kvtier needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
