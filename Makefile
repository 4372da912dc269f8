# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
#
#   make demo     train a model on real digits in a minute, write its pictures and ArviZ files to demo/
#   make test     lint, format, types, imports, and the tests of each change
#   make docs     the site, in build/site: open build/site/index.html
#
# All make the virtual environment first. Another Python, beside the usual environment:
#   make PYTHON=python3.13 VENV=.venv-new UPGRADE=1 test-subset

# The first of these that starts and is new enough; name another with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
	>/dev/null 2>&1; then echo $$p; break; fi; done)
VENV ?= .venv
WORKERS ?= 2
# A file stays with one worker: compilation takes most of the time, and the tests of a file share programs.
SPREAD := -n $(WORKERS) --dist loadfile
# What a new version of jax, numpyro, xarray or ArviZ is likely to break.
SUBSET ?= tests/core/test_random.py tests/data tests/diagnostics/test_datatree.py \
	tests/graph/test_graph.py tests/kernels/test_gibbs.py tests/training/test_checkpoint.py
# Everything that draws, under JAX's strictest settings.
STRICT ?= tests/test_strict.py
PAGES ?= tests/test_pages.py
TWO := XLA_FLAGS=--xla_force_host_platform_device_count=2
# What was compiled once is read from here: tests that ran before take a quarter of the time, and workers share.
CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ebmpp
export JAX_COMPILATION_CACHE_DIR ?= $(CACHE)/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1
# jax 0.10.1 logs two errors for each program that it reads from the cache, about hints that no processor has.
export TF_CPP_MIN_LOG_LEVEL ?= 3
# Where this is set, each of two dozen processes would compile 2,600 modules of Python for itself.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PLOTS_STAMP := $(VENV)/.installed-plots
DOCS_STAMP := $(VENV)/.installed-docs
PIP_FLAGS := $(if $(UPGRADE),--upgrade --upgrade-strategy eager)

.PHONY: venv demo docs lint test test-pages test-strict test-subset test-nightly test-shapes test-release release-check bench papers format clean FORCE

define MAKE_VENV
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with venv found: PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
endef

venv: $(STAMP)

# Not compiled at once: most of what is installed is never imported, and that takes half a minute.
# UPGRADE=1 takes the newest jax, arviz and everything else, also where older ones are installed.
$(STAMP): pyproject.toml $(if $(UPGRADE),FORCE)
	$(MAKE_VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) -e ".[test]"
	touch $(PLOTS_STAMP) $@

FORCE:

# The demo needs none of the tests' tools; `make test` adds them to the same environment.
$(PLOTS_STAMP): pyproject.toml $(if $(UPGRADE),FORCE)
	$(MAKE_VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) -e ".[plots]"
	touch $@

demo: $(PLOTS_STAMP)
	$(BIN)/python -m ebmpp --out demo

# What the site alone needs comes here, so that the tests need none of it.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(PIP_FLAGS) -e ".[docs]"
	touch $@

# From docstrings, pages and the notebooks' stored outputs. Only a sample report is computed, and nothing is fetched. Anew
# each time, so that a warning is there the second time, too; it is an error, and so is a reference that leads nowhere.
docs: $(DOCS_STAMP)
	rm -rf build/site
	$(BIN)/python -m sphinx -q -W --keep-going -E -c docs -d build/doctrees . build/site
	@echo "build/site/index.html"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check --python $(BIN)/python
	$(BIN)/lint-imports --no-logo

test: lint
	$(BIN)/python -m pytest $(SPREAD)

# Code of README, the pages and the docstrings.
test-pages: $(STAMP)
	$(BIN)/python -m pytest -q $(SPREAD) -m nightly $(PAGES)
	$(BIN)/python -m pytest -q $(SPREAD) --doctest-modules ebmpp

# Further cases, models, devices, the report and plots. Nothing that another target runs.
test-nightly: $(STAMP)
	$(BIN)/python -m pytest -q $(SPREAD) -m "nightly and not release" --ignore=$(STRICT) --ignore=$(PAGES)

# Every model program, rows of the papers, longer tutorials: before a release, after all other targets.
test-release: $(STAMP)
	$(BIN)/python -m pytest -q $(SPREAD) -m release

# Twice: 64-bit floats and 32-bit data are two dtypes, which strict promotion would refuse.
test-strict: $(STAMP)
	$(TWO) JAX_NUMPY_RANK_PROMOTION=raise JAX_NUMPY_DTYPE_PROMOTION=strict JAX_DEBUG_NANS=1 \
		$(BIN)/python -m pytest -q -n $(WORKERS) -m nightly $(STRICT)
	$(TWO) JAX_NUMPY_RANK_PROMOTION=raise JAX_ENABLE_X64=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m nightly $(STRICT)

# Shapes and dtypes of annotations, checked by beartype at each call.
test-shapes: $(STAMP)
	EBMPP_CHECK_SHAPES=1 $(BIN)/python -m pytest -q $(SPREAD)

# Does the package work with this environment's versions? For a newer Python than the usual one.
test-subset: $(STAMP)
	$(BIN)/python -m pytest $(SPREAD) -x -q $(SUBSET)

# What a release must pass: it builds, its extras resolve, and in fresh environments of every Python here the wheel does
# what README, the docstrings and `python -m ebmpp` say. Needs a package index; minutes for each Python.
release-check: $(STAMP)
	$(BIN)/python tests/support/release_check.py $(RELEASE)

# Speed: two minutes. Times are saved in .benchmarks; compare commits by `pytest-benchmark compare`. conftest.py is left
# out, as it has settings that make tests fast and programs slow.
bench: $(STAMP)
	$(BIN)/python -m pytest --noconftest benchmarks/speed --benchmark-autosave

# Lists the published analyses and the experiments of the papers. `python benchmarks/published/analyses.py all` runs the
# first in ten minutes, `python benchmarks/papers/papers.py` the others in hours.
papers: $(STAMP)
	@$(BIN)/python benchmarks/published/analyses.py
	@$(BIN)/python benchmarks/papers/papers.py --list

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The environment stays: it took minutes, and pyproject.toml renews it.
clean:
	rm -rf $(CACHE)/jax
	rm -rf demo run runs build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find ebmpp tests models benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
