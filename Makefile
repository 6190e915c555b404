# Everything starts here: `make serve`, `make test`, `make check`, `make test-gpu`, `make bench`.
# Each target sets itself up; Python 3.11 or newer and make are all that must be there.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PY ?= $(VENV)/bin/python
PORT ?=
CONFIG ?= configs/local-cpu.yaml
PYTEST_ARGS ?=
TEST_JOBS ?= 2
SEED ?=
REQUESTS ?=
CHAOS_ARGS ?=
OUT ?= measured

# An environment is reused only while the pins, the package's metadata and its own place are the same.
SETUP_ID := $(shell { cat requirements/lock.txt pyproject.toml; echo '$(abspath $(VENV))'; } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(SETUP_ID)
CLIENTS_ID := $(shell { cat requirements/clients.txt; echo '$(SETUP_ID)'; } | sha256sum | cut -c1-16)
CLIENTS_STAMP := $(VENV)/.clients-$(CLIENTS_ID)
SANITIZER_ID := $(shell { cat requirements/sanitizer.txt; echo '$(SETUP_ID)'; } | sha256sum | cut -c1-16)
SANITIZER_STAMP := $(VENV)/.sanitizer-$(SANITIZER_ID)

.PHONY: help setup serve check test test-gpu sanitize-gpu sanitize-host bench measure-gpu measure-two-gpus chaos soak docs lock clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## Make .venv with the pinned packages

$(STAMP): requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "antiphon needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=." >&2; exit 1; }
	@rm -f $(VENV)/.installed-*
	@$(VENV)/bin/python -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/lock.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Only tests need them, so they stay out of what `make serve` waits for. What gpt-oss wants Python 3.12 for is not its model.
$(CLIENTS_STAMP): requirements/clients.txt $(STAMP)
	@rm -f $(VENV)/.clients-*
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
	  -r requirements/clients.txt
	@touch $@

$(SANITIZER_STAMP): requirements/sanitizer.txt $(STAMP)
	@rm -f $(VENV)/.sanitizer-*
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/sanitizer.txt
	@touch $@

serve: $(STAMP) ## Start everything on this machine (PORT=, CONFIG=)
	@exec $(VENV)/bin/antiphon serve --config $(CONFIG) $(if $(PORT),--port $(PORT))

check: $(STAMP) ## Lint, format, strict types and the layering of the folders
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	MYPYPATH=helm/monitoring $(PY) -m mypy helm/monitoring/*.py helm/*.py helm/antiphon/files/scripts/*.py \
	  docker/*.py requirements/*.py
	$(PY) -m pytest -q tests/test_layering.py

# One process runs the tests that start services, which mostly wait; the others compute beside it.
test: $(CLIENTS_STAMP) ## Every test that needs no GPU (PYTEST_ARGS= is passed on, TEST_JOBS=0 takes no processes)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	  $(PY) -m pytest -m 'not gpu' --numprocesses $(TEST_JOBS) $(PYTEST_ARGS)

# PY=python3 uses an interpreter that already has a CUDA build of torch, as on a GPU image.
test-gpu: $(if $(filter $(VENV)/bin/python,$(PY)),$(CLIENTS_STAMP)) ## The tests that need an H200 (PY= picks the interpreter)
	PYTHONPATH=src $(PY) -m pytest -m gpu $(PYTEST_ARGS)

sanitize-gpu: $(if $(filter $(VENV)/bin/python,$(PY)),$(SANITIZER_STAMP)) ## Every kernel under compute-sanitizer, on an H200
	PYTHONPATH=src $(PY) tests/gpu/sanitizer/run_sanitizer.py $(SANITIZER_ARGS)

# Leaks are Python's; the compiler's library must come before Python's own memory.
sanitize-host: $(STAMP) ## CUDA kernels compiled for this machine, under AddressSanitizer
	LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	  ANTIPHON_ON_HOST_OPTIONS="-fsanitize=address -g" OMP_NUM_THREADS=1 \
	  $(PY) -m pytest -p no:cacheprovider --timeout 900 tests/kernels/*on_host.py $(PYTEST_ARGS)

bench: $(STAMP) ## Measure the deployment on this machine
	$(PY) -m antiphon.benchmarks.local_deployment --config $(CONFIG)

# Each of the programs ends within ten minutes; the second runs though the first failed.
measure-gpu: $(if $(filter $(VENV)/bin/python,$(PY)),$(STAMP)) ## What one H200 is needed for, into OUT= (PY= as test-gpu)
	PYTHONPATH=src $(PY) -m antiphon.benchmarks.one_gpu --out $(OUT) || status=$$?; \
	PYTHONPATH=src $(PY) -m antiphon.benchmarks.start_up --out $(OUT) || status=$$?; \
	exit $${status:-0}

measure-two-gpus: $(if $(filter $(VENV)/bin/python,$(PY)),$(STAMP)) ## What two H200s are needed for, into OUT=
	PYTHONPATH=src $(PY) -m antiphon.benchmarks.two_gpus --out $(OUT)

chaos: $(STAMP) ## Kill, stop and cut off parts of a deployment under load (SEED=, REQUESTS=)
	$(PY) tests/chaos/chaos_run.py --requests $(or $(REQUESTS),2000) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

soak: $(STAMP) ## Ten thousand short requests, memory flat (REQUESTS=)
	$(PY) tests/chaos/chaos_run.py --soak --requests $(or $(REQUESTS),10000) $(CHAOS_ARGS)

docs: $(STAMP) ## Write the pages that are made from the code
	$(PY) -m antiphon.configs.reference > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md
	$(PY) helm/values_reference.py
	$(PY) helm/monitoring/generate.py
	$(PY) helm/golden_renders.py
	$(PY) -m antiphon.benchmarks.report.page
	$(PY) -m antiphon.benchmarks.report.precision_page
	$(PY) -m antiphon.demo.report

lock: ## Write requirements/lock.txt from the present .venv, and the images' locks
	$(PY) requirements/write_lock.py > requirements/lock.txt.new
	mv requirements/lock.txt.new requirements/lock.txt
	$(PY) requirements/write_image_locks.py

clean: ## Remove the environment and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
