# Every target builds its own virtual environment first: `make demo` on a fresh machine is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
DOCS_STAMP := $(VENV)/.installed-docs

# Where it is set, each of the tests' processes would compile all that it imports, and pytest every test file.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all gpu lint bench docs clean package test-versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# What the pages need, and no test.
$(DOCS_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# What the demonstration needs, in less time than all that the tests do.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[plot]'
	touch $@

demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))
	$(BIN)/thinwire demo

# See tests/sharing.py. In one process: .venv/bin/python -m pytest
test: $(STAMP)
	$(BIN)/python -m pytest -n 4

# What takes longer than 30 s, or repeats what `make test` does with more cases. What fails beside others, because ranks
# waited for a core, is tried once more by itself.
test-all: test
	$(BIN)/python -m pytest -n 2 -m slow || $(BIN)/python -m pytest -m slow --last-failed --last-failed-no-failures none

# For the owner of a CUDA card: see docs/gpu.md.
gpu: $(STAMP)
	$(BIN)/python tests/gpu/gpu_report.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 2 -m docs tests/unit/docs tests/pages

bench: $(STAMP)
	$(BIN)/python benchmarks/main_figures.py

docs: $(DOCS_STAMP)
	$(BIN)/sphinx-build -W -b html docs docs/_build/html

package: $(STAMP)
	$(BIN)/python tests/packaging/wheel.py

# With TORCH=2.9.1: install it too, and run the unit tests.
test-versions: $(STAMP)
	$(BIN)/python tests/packaging/versions.py $(if $(TORCH),--torch $(TORCH))

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache
