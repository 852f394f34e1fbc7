# Every target sets itself up: a fresh clone needs python >= 3.11, make and a package index.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help quickstart test check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   show what this machine has, then what stands so far, in a few seconds"
	@echo "make test         what CI runs: make check, then every test"
	@echo "make check        the part of it without tests: format, lint, types, import contracts"
	@echo "make bench        run every script in benchmarks/"
	@echo "make clean        remove .venv, caches and build outputs"
	@echo
	@echo "Each installs tstar into .venv first, once, with the versions in constraints.txt."
	@echo "PYTHON=python3.12       the interpreter that makes .venv (3.11 or newer)"
	@echo "PIP_FLAGS='...'         more options for pip; torch without CUDA, a far smaller download:"
	@echo "                        PIP_FLAGS='--extra-index-url https://download.pytorch.org/whl/cpu'"

$(INSTALLED): pyproject.toml constraints.txt
	@[ -x $(BIN)/pip ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: PYTHON=$(PYTHON) is not Python 3.11 or newer:" \
			"install one and name it, as in 'make PYTHON=python3.12 ...'" >&2; exit 1; }
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(INSTALLED)
	$(BIN)/tstar doctor
	$(BIN)/python examples/tour.py

test: check
	$(BIN)/pytest -q

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

bench: $(INSTALLED)
	@set -e; for script in $(sort $(wildcard benchmarks/*.py)); do \
		echo "$(BIN)/python $$script"; $(BIN)/python $$script; done

clean:
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
