# Every target does its own set-up: a fresh checkout needs nothing but Python 3.11 or newer and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-fast docs lint format clean

demo: $(STAMP)
	$(BIN)/shiftmend demo

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2

# For while you edit, in less than a minute: the core without the tests that are marked slow.
test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 -m "not slow" --ignore tests/research

# Runs every script of the gallery, and fails on any warning, such as a link that leads nowhere.
docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going docs build/docs
	@echo "open build/docs/index.html"

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
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,research,ray]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist docs/gallery docs/generated docs/sg_execution_times.rst .pytest_cache .mypy_cache .ruff_cache .hypothesis
