# Everything runs in one virtual environment outside the checkout. Its name is a hash of the pins and
# of the Python version, so checkouts with equal pins share it. `make VENV=DIR ...` takes another one.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help env demo test test-gpu lint

ifndef PYTHON
PYTHON := $(shell for python in python3.11 python3 python3.12 python3.13; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	command -v "$$python"; break; done)
endif
ifneq ($(PYTHON),)
KEY := $(shell "$(PYTHON)" -c 'import hashlib, sys; \
	pins = open("constraints.txt", "rb").read() + repr(sys.version_info[:2]).encode(); \
	print(hashlib.sha256(pins).hexdigest()[:12])')
endif
VENV ?= $(HOME)/.cache/sglang-guidance-buckets/env-$(KEY)
BIN := $(VENV)/bin
COMPLETE := $(VENV)/.complete-$(KEY)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  Environment: $(VENV)"

env: $(COMPLETE) ## set up the environment (11 GB, about 5 minutes, once) and install this checkout
	@echo "== Installing this checkout into $(VENV)"
	@rm -rf build  # or files that left python/ would be installed again
	@"$(BIN)/python" -m pip install --quiet --no-deps .

$(COMPLETE):
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.11 or newer is needed, and none was found as python3.11, python3, python3.12" \
			"or python3.13. Install one, or name it: make PYTHON=/path/to/python3 ..." >&2; exit 1; fi
	@echo "== Setting up $(VENV) with $$("$(PYTHON)" --version)"
	@echo "== sglang[diffusion] and all that it needs: 11 GB, about 5 minutes. This happens once."
	@"$(PYTHON)" -m venv "$(VENV)"
	@"$(BIN)/python" -m pip install --constraint constraints.txt ".[test]" ruff
	@touch "$@"
	@echo "== The environment is complete"

demo: env ## serve a checkpoint, ask it with several curves: MODEL=DIR (default: examples/shapes), DEMO_ARGS=
	@"$(BIN)/python" -u examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(DEMO_ARGS)

test: env ## run the tests: PYTEST_ARGS=, such as PYTEST_ARGS=test/unit
	@"$(BIN)/python" -u -m pytest -v $(PYTEST_ARGS)

test-gpu: env ## run the tests that need a GPU
	@"$(BIN)/python" -u -m pytest -v -m gpu $(PYTEST_ARGS)

lint: env ## run ruff
	@"$(BIN)/ruff" check .
