# make lab       set up and open JupyterLab on the workbench
# make test      everything that needs no GPU: ruff, mypy, the tests, the notebooks, a real browser
# make test-gpu  the tests that need one
# make test-ray  the tests of replicas and of training by Ray; installs it (500 MB) into .venv
# make test-oldest  the tests with the oldest versions that pyproject.toml allows, in an environment of its own
# make lint      ruff and mypy alone
# make doctor    set up and say what is here and what is missing
# make media     remake the README's pictures from the real page
# make clean     remove the environment and what was built
#
# ARGS passes words on:  make lab ARGS="--port 9000 --no-browser"   make test ARGS="-k monitor"
#                        make lab ARGS=--app   the workbench without its notebook, by Voila
# PYTHON chooses the Python that .venv is made from:  make lab PYTHON=python3.12
# WORKERS tests so many files at a time:  make test WORKERS=0   one after the other, in twice the time of 3

.DEFAULT_GOAL := help
.PHONY: help lab test test-gpu test-ray test-oldest lint style types tested doctor media clean installed chromium compiled oldest collected

PYTHON ?=
WORKERS ?= 3
ARGS ?=
BIN := .venv/bin
FIND_PYTHON = python=$$(PYTHON="$(PYTHON)" sh tools/find_python.sh)
SETUP = $(FIND_PYTHON) && "$$python" tools/setup_env.py --extra app --extra optimal --extra serve

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

lab:
	@test -e .venv/eet-lab-stamp.json || echo "The first time pip takes about two minutes with torch for the CPU (0.4 GB), longer with torch for CUDA (2.9 GB). Then the workbench opens."
	@$(SETUP)
	@exec $(BIN)/eet-lab lab $(ARGS)

doctor:
	@$(SETUP)
	@$(BIN)/eet-lab doctor

lint: style types

style:
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

# pip would compile 18,000 files one after the other, most of which no test imports; Python keeps what it compiled itself.
test: export PIP_COMPILE := 0
test: export PYTHONDONTWRITEBYTECODE :=
test:
	@$(MAKE) --no-print-directory --jobs 3 chromium compiled installed
	@$(MAKE) --no-print-directory --jobs 4 oldest collected style
	@$(MAKE) --no-print-directory --jobs 2 tested types

# Pages and notebooks leave a core idle now and then: mypy has those times.
tested:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

types:
	nice -n 19 $(BIN)/python -m mypy

installed:
	@$(SETUP) --extra test

chromium:
	@$(FIND_PYTHON) && "$$python" tools/chromium.py

# The machine code of changed kernels, which a test reads: a core takes a minute and a half, the one that pip has no use for.
compiled:
	@$(FIND_PYTHON) && PYTHONPATH="$$PWD" nice -n 19 "$$python" tests/machine_code.py

oldest:
	@$(BIN)/python tools/oldest.py

# Compiles the tests, or each of the workers would, and tells what cannot be collected, also of the tests that need a GPU.
collected:
	@told=$$(OMP_NUM_THREADS=1 $(BIN)/python -m pytest --collect-only -qqq -m "gpu or not gpu" 2>&1) || { echo "$$told"; exit 1; }

test-gpu:
	@$(SETUP) --extra test
	$(BIN)/python -m pytest -m gpu $(ARGS)

test-ray:
	@$(SETUP) --extra test --extra ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serving/test_replicas.py tests/serving/test_ray_cluster.py tests/test_ray_train.py $(ARGS)

test-oldest:
	@$(FIND_PYTHON) && "$$python" tools/oldest.py --all $(ARGS)

media:
	@$(SETUP) --extra dev
	@$(BIN)/python tools/chromium.py
	$(BIN)/python tools/media.py $(ARGS)

clean:
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
