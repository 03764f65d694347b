# make demo    train the tiny model on this machine's own Python sources (under 5 minutes on 2 cores)
# make test    the test suite       make test-slow   the studies that are too long for CI
# make lint    ruff and pyright     make clean-venv  remove the environment
# PYTHON=python3.12 picks the interpreter, VENV=folder the environment, ARGS="..." goes to the program.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PY = $(VENV)/bin/python
JOBS ?= 2

.PHONY: demo test test-slow lint clean-venv help
.DEFAULT_GOAL := help

help:
	@sed -n '1,4s/^# //p' Makefile

demo: $(VENV)/.installed-plot
	@$(PY) -m experiments.pretrain $(ARGS)

# One worker a file: files share their session fixtures and compiled functions.
test: $(VENV)/.installed-test
	JAX_PLATFORMS=cpu $(PY) -m pytest -n $(JOBS) --dist loadfile -m "not slow and not gpu" $(ARGS)

test-slow: $(VENV)/.installed-test
	JAX_PLATFORMS=cpu $(PY) -m pytest -m "slow and not gpu" $(ARGS)

lint: $(VENV)/.installed-lint
	$(PY) -m ruff check .
	$(PY) -m pyright --pythonpath $(PY)

clean-venv:
	rm -rf $(VENV)

# One stamp for each set of extras; a stamp older than pyproject.toml installs again. The stamp is written last, so an
# interrupted installation is repeated. A venv without a working pip (an interrupted creation) is made anew.
$(VENV)/.installed-%: pyproject.toml
	@if ! $(PY) -m pip --version >/dev/null 2>&1; then \
	  found=$$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null) || found=""; \
	  if [ -z "$$found" ]; then \
	    echo "error: $(PYTHON) does not run; moejax needs Python >= 3.11. Say which one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; fi; \
	  if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	    echo "error: $(PYTHON) is Python $$found; moejax needs Python >= 3.11. Say which one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; fi; \
	  echo "making $(VENV) with Python $$found"; \
	  $(PYTHON) -m venv --clear $(VENV) || { echo "error: $(PYTHON) -m venv failed (on Debian: apt-get install python3-venv)" >&2; exit 1; }; \
	fi
	@if ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
	  echo "error: $(VENV) holds $$($(PY) --version 2>&1); moejax needs Python >= 3.11. Remove it: make clean-venv" >&2; exit 1; fi
	@echo "installing moejax[$*] into $(VENV) (once; again only when pyproject.toml changes)"
	@$(PY) -m pip install --quiet -e ".[$*]"
	@touch $@
