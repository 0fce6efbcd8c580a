# make demo   real text through an expert-parallel MoE layer on four processes
# make test   all tests that this machine can run
# The first run makes .venv and installs into it; a repeat run installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format clean

demo: $(VENV)/.demo-installed
	$(BIN)/ep-a2a demo $(ARGS)

test: $(VENV)/.test-installed
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.demo-installed: pyproject.toml tools/install.py
	$(PYTHON) tools/install.py $(VENV)
	touch $@

$(VENV)/.test-installed: pyproject.toml tools/install.py
	$(PYTHON) tools/install.py $(VENV) --extra test
	touch $@ $(VENV)/.demo-installed

clean:
	rm -rf $(VENV)
