# Every target sets itself up: a fresh clone needs python >= 3.11, make and a package index.
PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
BENCH ?= $(sort $(wildcard benchmarks/*.py))
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help quickstart test check bench clean
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   the whole story on this machine, to runs/quickstart/report.html: an AR model, bases"
	@echo "                  at B = 4, 8, 16, direct TraceRL, T*, all evaluated. ARGS=--smoke: all of it, but short"
	@echo "make test         what CI runs: make check, then every test"
	@echo "make check        the part of it without tests: format, lint, types, import contracts"
	@echo "make bench        run every script in benchmarks/, for figures on a machine that does nothing else;"
	@echo "                  one alone: make bench BENCH=benchmarks/model.py ARGS='--rounds 6'"
	@echo "make clean        remove .venv, caches and build outputs"
	@echo
	@echo "Each installs tstar into .venv first, once, with the versions in constraints.txt."
	@echo "ARGS='...'              more arguments: of tstar quickstart, of pytest, of a benchmark"
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
	$(BIN)/tstar quickstart $(ARGS)

test: check
	$(BIN)/pytest -q $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

bench: $(INSTALLED)
	@set -e; for script in $(BENCH); do \
		echo "$(BIN)/python $$script $(ARGS)"; $(BIN)/python $$script $(ARGS); done

clean:
	rm -rf .venv build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
