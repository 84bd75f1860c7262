# `make demo` and `make test` need only python3 and make: the environment is made on the first call and kept.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo quick test lint costs bench mutate load dist clean

setup: $(READY)

# Made again only when the dependencies change; the package itself is installed in place.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/aaconv demo

# One thread per worker: the workers take the cores. Idle ones take over tests of busy ones, which differ in length.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

# What can fail in two minutes.
quick: setup
	$(PYTEST) -m 'not slow and not browser and not processes'

test: setup
	$(PYTEST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Count the models again: `aaconv models` and `aaconv table` answer from the file that this writes.
costs: setup
	$(BIN)/python -m aaconv.paper.recount

bench: setup
	$(BIN)/aaconv bench layer

# Would the tests notice? A sample of small changes of the source, each against the tests of its file: an hour or so.
MUTATE ?= --sample 300
mutate: setup
	OMP_NUM_THREADS=1 $(BIN)/python tools/mutate.py $(MUTATE)

# How much the package bears: 200,000 images, 2,000 steps, a report of 500 runs, a page of 50 images.
load: setup
	OMP_NUM_THREADS=1 $(BIN)/python tools/load.py

# The tests of a GPU, where there is one: eight processes share it.
GPU_TESTS ?= --processes 8
.PHONY: test-gpu
test-gpu: setup
	$(BIN)/python tools/gpu_tests.py $(GPU_TESTS)

# accelerate against the modules of transformers, in an environment that adds it to the first one; and against those of
# segment-anything and detectron2, if somebody has installed them there.
FAMILIES := $(VENV)/families
SITE = -c 'import site; print(site.getsitepackages()[0])'
.PHONY: test-families
$(FAMILIES)/.ready: $(READY)
	$(PYTHON) -m venv $(FAMILIES)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(FAMILIES)/bin/python $(SITE))/first.pth"
	$(FAMILIES)/bin/python -m pip install --quiet --disable-pip-version-check transformers
	touch $@

test-families: $(FAMILIES)/.ready
	OMP_NUM_THREADS=1 $(FAMILIES)/bin/python -m pytest tests/families

# The wheel and the source distribution, checked as a package index checks them.
dist: setup
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# The documentation, strictly, in an environment that adds mkdocs to the first one: a broken link fails, and a public
# name that docs/api.md does not have.
DOCS := $(VENV)/docs
.PHONY: docs
$(DOCS)/.ready: $(READY)
	$(PYTHON) -m venv $(DOCS)
	echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > "$$($(DOCS)/bin/python $(SITE))/first.pth"
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch $@

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) build dist
