# Everything runs from a private environment in .venv, made on first use; only Python 3.11 or newer is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable

ifneq ($(wildcard ../shared/data),)
export FEWSHOT_DATA ?= $(abspath ../shared/data)
endif

# Test files are shared by a few processes; each compiles on its own and takes some 2 GB.
WORKERS := -n logical --maxprocesses 4 --dist loadfile
ONE_CORE := $(if $(shell command -v taskset),taskset -c 0)

.DEFAULT_GOAL := help
.PHONY: help install train test long slow browser fuzz lint bench docs notebooks links

help:
	@echo "make train      meta-train on the built-in characters and test (ARGS='--shot 5' passes options on)"
	@echo "make test       the default tests; ARGS='-k metrics' selects"
	@echo "make long       the tests that take seconds each, which CI runs too"
	@echo "make slow       the statistical tests, and those that take minutes"
	@echo "make browser    the reports in headless Chromium, which comes with the extra browser (650 MB)"
	@echo "make fuzz       20,000 odd tasks and 4,000 damaged files: 0 tracebacks, NaN, hangs and bad codes are wanted"
	@echo "make lint       format, lint and type checks"
	@echo "make bench      what inference and training steps cost, as ratios to the backbone of the same run"
	@echo "make docs       build the documentation in site/; warnings and links to nothing are errors"
	@echo "make notebooks  execute notebooks/*.py and write them as .ipynb, with outputs"
	@echo "make install    the environment with all that developing needs"

install: $(VENV)/.installed-dev

train: $(VENV)/.installed
	$(BIN)/python runners/meta_train.py $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

long: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "long and not slow" $(WORKERS) $(ARGS)

slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m slow $(WORKERS) $(ARGS)

browser: $(VENV)/.installed-browser
	$(BIN)/python -m pytest -m slow tests/test_browser.py $(ARGS)

# Two processes, some 22 minutes of processor time; ARGS='--tasks 1000' makes it shorter.
fuzz: $(VENV)/.installed-test
	PYTHONPATH=$(CURDIR) $(BIN)/python tests/fuzz.py $(ARGS)

# Type checkers and the reference do not follow the installation's folder mapping; links show the one package `fewshot`.
links:
	@mkdir -p .typing/fewshot
	@ln -sfn $(foreach path,evaluation inference learners models runners tasks training $(wildcard fewshot/*.py) fewshot/py.typed,../../$(path)) .typing/fewshot/

lint: $(VENV)/.installed-dev links
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# Held on one core where the system can do that, so that times are those of a core. Peers: pip install -e '.[peers]'.
bench: $(VENV)/.installed-bench
	@mkdir -p .benchmarks
	$(ONE_CORE) $(BIN)/python -m pytest benchmarks/suite.py -q --benchmark-quiet --benchmark-json=.benchmarks/latest.json
	@$(BIN)/python benchmarks/summary.py .benchmarks/latest.json

# The reference is read from the files, nothing is imported; the variable leaves out an advertisement. Not --quiet, which
# hides warnings from --strict too.
docs: $(VENV)/.installed-docs links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

notebooks: $(VENV)/.installed-notebooks
	$(BIN)/python -m jupytext --to notebook --run-path $(CURDIR) --execute notebooks/*.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, got %s; try make PYTHON=python3.12" % sys.version.split()[0])'
	@echo "Creating $(VENV) and installing; this takes a minute or two, once."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# A stamp for each set of extras, so that nothing is installed twice.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@$(INSTALL) . && touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@$(INSTALL) '.[test]' && touch $@ $(VENV)/.installed

$(VENV)/.installed-browser: pyproject.toml | $(BIN)/python
	@$(INSTALL) '.[test,browser]' && touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-notebooks: pyproject.toml | $(BIN)/python
	@$(INSTALL) '.[notebooks,photographs]' && touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@$(INSTALL) '.[docs]' && touch $@ $(VENV)/.installed

$(VENV)/.installed-bench: pyproject.toml | $(BIN)/python
	@$(INSTALL) '.[test,bench]' && touch $@ $(VENV)/.installed $(VENV)/.installed-test

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@$(INSTALL) '.[test,bench,dev]' && touch $@ $(VENV)/.installed $(VENV)/.installed-test $(VENV)/.installed-bench
