# Five words: demo, check, test, bench, docs. The first one that needs it makes a virtual environment in .venv.

PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
CORE := $(VENV)/.core-installed
DEV := $(VENV)/.dev-installed

.DEFAULT_GOAL := help
.PHONY: help demo check test bench docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(CORE) ## diagnose the real 8-GPU traces in samples/ and write report.html
	@echo "Diagnosing 8 ranks of an FSDP2 step on 8 x H200, one of which was made to stall (samples/fsdp-host-stall):"
	@$(BIN)/counterpoint diagnose samples/fsdp-host-stall --out report.html

check: $(DEV) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check docs ## check, docs and all tests; PYTEST_ARGS="..." goes to pytest
	$(BIN)/pytest $(PYTEST_ARGS)

bench: $(DEV) ## the planner's error on published steps; the reader beside HolisticTraceAnalysis (BENCH_ARGS="--quick")
	$(BIN)/python benchmarks/plan_published.py
	$(BIN)/python benchmarks/trace_load.py $(BENCH_ARGS)

docs: $(DEV) ## check the links and anchors of README.md, docs/ and the other pages
	$(BIN)/python docs/check_links.py

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
