# Each target sets up what it needs; `make serve` and `make test` work on a fresh machine from a fresh clone.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# A warning of setuptools about editable installs is no news to anybody here.
PIP = PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q
CONSTRAINTS = ci/constraints.txt
ARGS ?=

.PHONY: serve test test-all lint bench clean

# Serves the built-in demo model on http://127.0.0.1:8000; MODEL=... and ARGS="--port 9000" change that.
serve: $(VENV)/.serve
	$(BIN)/octavo serve $(MODEL) $(ARGS)

# Everything that CI checks, in under 20 minutes on 2 cores.
test: lint
	$(BIN)/pytest -m "not slow" $(ARGS)

# The long tests too.
test-all: lint
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# What the core itself costs a step, without a model; see benchmarks/.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/core_overhead.py

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip

$(VENV)/.serve: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -c $(CONSTRAINTS) -e '.[cpu]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml $(CONSTRAINTS)
	$(PIP) -c $(CONSTRAINTS) -e '.[cpu,dev]'
	touch $@ $(VENV)/.serve
