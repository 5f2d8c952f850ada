# Each target does all set-up by itself; the stamp makes the second call instant.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/pip install --quiet --disable-pip-version-check

export TOKENIZERS_PARALLELISM := false

.PHONY: setup test fuzz demo demo-checkpoints lint bench docs lock clean

setup: $(STAMP)

# torch first and by its exact version: a machine that has a local CPU build of it then uses that one.
$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -r requirements.lock
	$(PIP) --no-deps --editable .
	touch $(STAMP)

# Two test processes, since ranks often wait; each has all tests of a file, and files begin in the order of their names.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Hostile checkpoints by the thousand; the suite runs 500 of them.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONMALLOC=malloc \
		$(BIN)/python -m tests.faults.fuzz --examples 20000

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

bench: $(STAMP)
	$(BIN)/python benchmarks/checkpoint.py

# Every command in the documentation that is marked as runnable is run by its test.
docs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs

# Exact versions of what is installed now, for set-up on other machines; the torch line comes without its build's name.
lock: $(STAMP)
	$(BIN)/pip freeze --exclude-editable --exclude forgather | sed 's/^torch==\([0-9.]*\).*/torch==\1/' > requirements.lock

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache demo_output
