# The first word that needs it makes a virtual environment in .venv. PYTEST_ARGS goes to every pytest.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=
RANKS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed
PYTEST := $(BIN)/pytest
SELECTED = $(PYTEST_ARGS) $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ]) # with arguments, a lane may have no test that is meant

.DEFAULT_GOAL := help
.PHONY: help demo check unit test prove rehearse bench docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CORE) ## diagnose the real 8-GPU traces in samples/ and write report.html
	@echo "Diagnosing 8 ranks of an FSDP2 step on 8 x H200, one of which was made to stall (samples/fsdp-host-stall):"
	@$(BIN)/counterpoint diagnose samples/fsdp-host-stall --out report.html

check: $(DEV) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: $(DEV) ## tests that start no process and need no GPU: a minute
	$(PYTEST) -n 2 --hypothesis-profile=quick tests/unit $(SELECTED)

test: check docs unit ## check, docs, unit, golden, one case of each file of process and dist: six minutes; PYTEST_ARGS="..." goes to pytest
	$(PYTEST) -n 2 --dist loadgroup tests/golden $(SELECTED)
	$(PYTEST) -n 2 --dist worksteal -m smoke tests/process tests/dist $(SELECTED)

prove: $(DEV) ## all other tests of process and dist, proofs, and the random tests of unit with more examples
	$(PYTEST) -n 2 tests/proof $(SELECTED)
	$(PYTEST) -n 2 -m hypothesis tests/unit $(SELECTED)
	$(PYTEST) -n 2 --dist loadfile -m "not smoke" tests/process tests/dist $(SELECTED)

rehearse: $(DEV) ## tests/gpu with ranks that share GPUs, one is enough: ten minutes for 2; RANKS=8, up to 8 a GPU
	$(PYTEST) -n 2 --dist loadfile --ranks-per-gpu $(RANKS) tests/gpu $(SELECTED)

bench: $(DEV) ## the planner's error on published steps; the reader beside HolisticTraceAnalysis (BENCH_ARGS="--quick")
	$(BIN)/python benchmarks/plan_published.py
	$(BIN)/python benchmarks/trace_load.py $(BENCH_ARGS)

docs: $(DEV) ## check the pages: links, anchors, files they name, and tables against results/
	$(BIN)/python docs/check_links.py
	$(BIN)/python docs/write_tables.py --check

clean: ## remove .venv, caches and what demo wrote
	rm -rf $(VENV) .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist report.html

$(BIN)/python:
	@echo "Making a virtual environment in $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "counterpoint needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(CORE): pyproject.toml | $(BIN)/python
	@echo "Installing counterpoint ..."
	@$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@echo "Installing counterpoint and what its tests need ..."
	@$(PIP) -e '.[dev]'
	@touch $@ $(CORE)
