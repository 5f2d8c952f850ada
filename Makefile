# Each target does all set-up by itself; the stamp makes the second call instant.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Of torch, which the lock file does not have: each machine gets the build that its package index has.
TORCH := 2.13.0
OTHER_VENV := .venv-torch-$(VERSION)
PIP_FLAGS := --quiet --disable-pip-version-check

export TOKENIZERS_PARALLELISM := false

.PHONY: setup test test-torch fuzz kill-points demo demo-checkpoints lint house prose bench docs lock clean

setup: $(STAMP)

FOUND = $(shell $(PYTHON) -c 'import sys; v = sys.version_info; print("%d.%d.%d %s" % (v[0], v[1], v[2], "fits" if v >= (3, 11) else "old"))' 2>/dev/null)
REMEDY = Forgather needs Python 3.11 or newer; choose another one: make PYTHON=python3.12
check_python = $(if $(FOUND),$(if $(filter fits,$(FOUND)),,$(error $(PYTHON) is Python $(firstword $(FOUND)). $(REMEDY))),$(error $(PYTHON) does not run. $(REMEDY)))

# $(1): the environment, $(2): the version of torch. torch comes first, so that a local CPU build is used where there is
# one. All else is checked against the hashes of the lock file, but for what only this build of torch needs.
define install
	$(check_python)
	$(PYTHON) -m venv $(1)
	$(1)/bin/pip install $(PIP_FLAGS) --no-deps torch==$(2)
	$(1)/bin/pip install $(PIP_FLAGS) --no-deps --require-hashes -r requirements.lock
	$(1)/bin/pip install $(PIP_FLAGS) torch==$(2)
	$(1)/bin/pip install $(PIP_FLAGS) --no-deps --editable .
	touch $(1)/.installed
endef

$(STAMP): requirements.lock pyproject.toml
	$(call install,$(VENV),$(TORCH))

$(OTHER_VENV)/.installed: requirements.lock pyproject.toml
	$(if $(VERSION),,$(error Which torch? Give its version: make test-torch VERSION=2.15.0))
	$(call install,$(OTHER_VENV),$(VERSION))

# Two test processes, since ranks often wait; each has all tests of a file, and files begin in the order of their names.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The suite with another torch, in an environment of its own: a download of gigabytes, and not a part of CI.
test-torch: $(OTHER_VENV)/.installed
	OMP_NUM_THREADS=1 $(OTHER_VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Hostile checkpoints by the thousand; the suite runs 500 of them.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONMALLOC=malloc \
		$(BIN)/python -m tests.guarantees.hostile_checkpoints.fuzz --examples 20000

# One of two ranks dies at each of its file operations; the suite tries one of four.
kill-points: $(STAMP)
	EVERY_KILL_POINT=1 $(BIN)/python -m pytest tests/guarantees/transactions/test_kill_points.py

# Trains; once more goes on where it stopped.
demo: $(STAMP)
	$(BIN)/forgather train

# Two ranks train, one is killed in the middle of a save, the run resumes.
demo-checkpoints: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python examples/checkpoint_demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Folders, class chains, shared attributes, calls of a step and a save, sizes: each with its aim.
house: $(STAMP)
	$(BIN)/python tools/house.py

# Markers of translated English, long sentences, clause headings, module docstrings, comments: each with its aim.
prose: $(STAMP)
	$(BIN)/python tools/prose.py

bench: $(STAMP)
	$(BIN)/python benchmarks/checkpoint.py

# Every command in the documentation that is marked as runnable is run by its test.
docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs

# Exact versions and hashes of what is installed now, for set-up on other machines.
lock: $(STAMP)
	$(BIN)/pip check --disable-pip-version-check
	$(BIN)/python .ci/lock.py requirements.lock
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-torch-* .pytest_cache .ruff_cache .mypy_cache demo_output
