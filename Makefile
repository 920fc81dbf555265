# Every target does its own set-up: a fresh checkout needs nothing but Python 3.11 or newer and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-fast lint format clean

demo: $(STAMP)
	$(BIN)/shiftmend demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2

# For while you edit, in less than a minute: the core without the tests that are marked slow.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 -m "not slow" --ignore tests/research

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Installed anew only when what is installed would differ.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,research,ray]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
