# Each target runs the set-up first. The stamp makes later calls instant.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Version of torch. The lock file omits torch, so each machine installs the build of its package index.
TORCH := 2.13.0
OTHER_VENV := .venv-torch-$(VERSION)
DOCS_VENV := .venv-docs
RAY_VENV := .venv-ray
PIP_FLAGS := --quiet --disable-pip-version-check

export TOKENIZERS_PARALLELISM := false
# Keep compiled bytecode, also where the environment turns it off: each test process would compile every module again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup test test-all rehearse test-torch fuzz kill-points demo demo-checkpoints lint house prose bench docs site test-docs lock lock-docs clean soak watch-faults elastic dist test-slurm test-ray test-examples

setup: $(STAMP)

FOUND = $(shell $(PYTHON) -c 'import sys; v = sys.version_info; print("%d.%d.%d %s" % (v[0], v[1], v[2], "fits" if v >= (3, 11) else "old"))' 2>/dev/null)
REMEDY = Forgather needs Python 3.11 or newer; choose another one: make PYTHON=python3.12
check_python = $(if $(FOUND),$(if $(filter fits,$(FOUND)),,$(error $(PYTHON) is Python $(firstword $(FOUND)). $(REMEDY))),$(error $(PYTHON) does not run. $(REMEDY)))

# $(1): environment, $(2): version of torch. torch comes first, so that a local CPU build is used if there is one. pip
# checks all other packages against the hashes of the lock file, except packages that only this build of torch needs.
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

# Three test processes on two cores, since ranks often wait. All tests of a file run in one process, and files start in order of name.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# The suite with every case of the long parametrisations, and every kill point.
test-all: $(STAMP)
	EVERY_CASE=1 EVERY_KILL_POINT=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Tests on a CUDA device and NCCL that the CPU imitates. A C++ compiler builds the device once; without one they are skipped.
rehearse: $(STAMP)
	$(BIN)/python -m tests.support.rehearsal $(BIN)/python -m pytest -n 2 --dist loadfile tests/rehearsal

# Run every program in examples/ twice: compare its output with the file beside it, then start it again to resume.
test-examples: $(STAMP)
	TEST_EXAMPLES=1 $(BIN)/python -m pytest -n 2 --durations 0 --durations-min 1 tests/examples

# The suite with another torch, in a separate environment. It downloads gigabytes and is not part of CI.
test-torch: $(OTHER_VENV)/.installed
	OMP_NUM_THREADS=1 $(OTHER_VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Fuzz test with 20,000 hostile checkpoints. The suite runs 200 of them.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONMALLOC=malloc \
		$(BIN)/python -m tests.guarantees.hostile_checkpoints.fuzz --examples 20000

# Kill a rank at each of its file operations. The suite tries a sample of them.
kill-points: $(STAMP)
	EVERY_CASE=1 EVERY_KILL_POINT=1 $(BIN)/python -m pytest tests/guarantees/transactions/test_kill_points.py

# Kill random ranks of FSDP2, HSDP and DDP jobs at random times, resume, and compare the end bit for bit.
soak: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.soak --rounds 60

# Stop, kill and loop a rank of every strategy, and cut the link between two nodes. The suite tries a few of these faults.
watch-faults: $(STAMP)
	EVERY_CASE=1 EVERY_WATCH_FAULT=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/guarantees/no_hangs/test_watch.py \
		tests/guarantees/no_hangs/test_watch_network.py

# Jobs that lose nodes by SIGKILL and get them back, compared with a job that kept its ranks. Takes minutes.
elastic: $(STAMP)
	ELASTIC=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/guarantees/elastic

# Jobs on a Slurm cluster of this machine: slurmctld and two slurmd. Installs Debian's packages, if they are missing, as root.
test-slurm: $(STAMP)
	test -x /usr/sbin/slurmctld -a -x /usr/sbin/slurmd -a -x /usr/bin/srun || \
		{ apt-get update && apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client; }
	SLURM_TESTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/guarantees/slurm

# Jobs on a Ray cluster of this machine, and the example, in a separate environment: Ray is large and not part of CI.
test-ray: $(RAY_VENV)/.ray-installed
	TEST_EXAMPLES=1 OMP_NUM_THREADS=1 $(RAY_VENV)/bin/python -m pytest --durations 0 --durations-min 1 tests/guarantees/ray \
		"tests/examples/test_examples.py::test_example_prints_the_expected_output_and_resumes[ray_train]"

$(RAY_VENV)/.ray-installed: requirements.lock pyproject.toml
	$(call install,$(RAY_VENV),$(TORCH))
	$(RAY_VENV)/bin/pip install $(PIP_FLAGS) torch==$(TORCH) --editable '.[ray]'
	touch $@

# Train a small model. A second call resumes where the first stopped.
demo: $(STAMP)
	$(BIN)/forgather train

# Train on two ranks, kill one during a save, and resume.
demo-checkpoints: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python examples/checkpoint_demo.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Print figures with their aims: folders, class chains, shared attributes, calls of a step and a save, sizes.
house: $(STAMP)
	$(BIN)/python tools/house.py

# Print figures with their aims: markers of translated English, long sentences, headings, docstrings, comments.
prose: $(STAMP)
	$(BIN)/python tools/prose.py

bench: $(STAMP)
	$(BIN)/python benchmarks/checkpoint.py

# Build the documentation as a static site in `site/`. Warnings, such as broken links, are errors. Needs no torch.
docs: $(DOCS_VENV)/.installed
	PYTHONPATH=src:tools $(DOCS_VENV)/bin/python -m docsite site

site: docs

$(DOCS_VENV)/.installed: requirements-docs.lock
	$(check_python)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install $(PIP_FLAGS) --no-deps --require-hashes -r requirements-docs.lock
	touch $@

# Run all code blocks of the documentation. Takes many minutes; `make test` runs the programs and a few commands.
test-docs: $(STAMP)
	TEST_DOCS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations 0 --durations-min 5 tests/docs

# Write the exact versions and hashes of the installed packages, for set-up on other machines.
lock: $(STAMP)
	$(BIN)/pip check --disable-pip-version-check
	$(BIN)/python .ci/lock.py requirements.lock
	touch $(STAMP)

# Build wheel and source distribution into dist/, and check their files. Uses an environment of its own.
dist: $(STAMP)
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install $(PIP_FLAGS) build
	rm -rf dist build
	.venv-dist/bin/python -m build --outdir dist .
	DIST=dist $(BIN)/python -m pytest tests/test_distribution.py

# The same for the environment that builds the documentation.
lock-docs: $(DOCS_VENV)/.installed
	$(DOCS_VENV)/bin/python .ci/lock.py requirements-docs.lock
	touch $(DOCS_VENV)/.installed

clean:
	rm -rf $(VENV) $(DOCS_VENV) $(RAY_VENV) .venv-dist .venv-torch-* site build dist .pytest_cache .ruff_cache .mypy_cache demo_output
