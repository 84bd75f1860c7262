# `make demo` and `make test` need only python3 and make: the environment is made on the first call and kept.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint bench clean

setup: $(READY)

# Made again only when the dependencies change; the package itself is installed in place.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/aaconv demo

# One thread a worker: the workers take the cores.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: setup
	$(BIN)/aaconv bench layer

clean:
	rm -rf $(VENV)
