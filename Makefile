# momentd: everything a newcomer or CI runs. `make` alone lists the targets.
#
#   PYTHON=python3.12   interpreter for .venv (3.11 or newer)
#   TORCH='...'         what to give to `pip install` for torch; see README, "Which torch"
#   ARGS='...'          options for `make demo`, `make test` and `make bench`

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHOICE := $(VENV)/.torch

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test check fix bench protos torture clean FORCE

help: ## Lists the targets.
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

setup: $(STAMP) ## Installs everything into .venv; a second run does nothing.

demo: $(STAMP) ## Trains 2.6 million embeddings whose moments do not fit the cache.
	@$(BIN)/python -m examples.taxonomy $(ARGS)

test: $(STAMP) ## Runs all tests (not torture).
	@$(BIN)/python -m pytest -m 'not torture' $(ARGS)

torture: $(STAMP) ## Random kills and faults, for minutes.
	@$(BIN)/python -m pytest -s -m torture --timeout=0 -o faulthandler_timeout=0 $(ARGS)

bench: $(STAMP) ## Measures; writes JSON and PNG to benchmarks/results.
	@$(BIN)/python -m benchmarks $(ARGS)

check: $(STAMP) ## Verifies style, types, layers, protos; changes nothing.
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python scripts/gen_protos.py --check

fix: $(STAMP) ## Formats, and repairs what can be repaired.
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/buf format --write

protos: $(STAMP) ## Generates the Python code of the contract again.
	@$(BIN)/python scripts/gen_protos.py

clean: ## Removes the environments and everything that tools left behind.
	@rm -rf $(VENV) .venv-protos build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------ installation

# The stamp is newer than all it depends on exactly when .venv is up to date.
$(STAMP): pyproject.toml constraints-dev.txt scripts/setup.sh $(CHOICE)
	@scripts/setup.sh "$(PYTHON)" "$(VENV)" "$$(cat $(CHOICE))"
	touch $@

# Holds the choice of torch; rewritten, and so newer than the stamp, only when TORCH says another.
$(CHOICE): FORCE
	@mkdir -p $(VENV)
	if [ ! -f $@ ] || { [ -n "$(TORCH)" ] && [ "$(TORCH)" != "$$(cat $@)" ]; }; then
	  echo "$(TORCH)" > $@
	fi

FORCE:
