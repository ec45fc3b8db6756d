# Every target makes its own environment in .venv when there is none (.venv-gpu
# for GPUs), and installs again only when pyproject.toml has changed.

PYTHON ?= python3
TENSORFLOW ?= cpu
# Tests start many processes; what they import is compiled once, not in each.
export PYTHONDONTWRITEBYTECODE :=
# For two cores, and a third process as many tests wait, for links that are cut
# and for processes that are gone. The tests of a file share what takes long to
# make; a test that ends its process ends the session soon, not hours later. Files
# with many tests do not come first: those with few are jobs, and take longest.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 3
# TensorFlow for GPUs has the files of the one for CPUs: no environment has both.
VENV := .venv$(if $(filter-out cpu,$(TENSORFLOW)),-$(TENSORFLOW))
BIN := $(VENV)/bin
STAMP := $(VENV)/installed-$(TENSORFLOW)
HOROVOD := $(VENV)/horovod-$(TENSORFLOW)
BYTEPS := $(VENV)/byteps-$(TENSORFLOW)
DOCS := $(VENV)/docs
ECOSYSTEM := $(VENV)/ecosystem-$(TENSORFLOW)
RAY := $(VENV)/ray-$(TENSORFLOW)

.PHONY: demo test test-all test-ecosystem test-gpu test-ray \
	test-cluster test-matrix test-next mutants check lint types engines bench field docs \
	clean

demo: $(STAMP)
	$(BIN)/python examples/digits.py

# The same draw of the tests each time; another one for another seed, with
# KERAS_TOWERS_TEST_SEED=2. Continuous integration takes the number of the day.
test: engines
	$(MAKE) --no-print-directory --jobs=2 --output-sync lint types
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# All of them: also those that are not drawn, and that repeat what others show.
# With KERAS_TOWERS_TEST_OPTIMIZED=1, TensorFlow and XLA optimize every graph.
test-all: engines
	$(MAKE) --no-print-directory --jobs=2 --output-sync lint types
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "" --timeout 900

# With other packages that use Keras. Once they are installed, `make test` runs
# these too.
test-ecosystem: $(ECOSYSTEM)
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/ecosystem

# What needs GPUs, and the benchmark on all of them: one report, gpu-report.md.
# Horovod is tested there once `.venv-gpu/bin/keras-towers install horovod` has
# built it (--with-nccl: to sum on the GPUs).
ifeq ($(TENSORFLOW),gpu)
test-gpu: $(STAMP)
	tests/gpu/report.sh $(BIN)
else
test-gpu:
	@nvidia-smi --list-gpus || { echo "make test-gpu needs an NVIDIA GPU, but \
	nvidia-smi lists none: nothing was installed or run." >&2; exit 1; }
	$(MAKE) test-gpu TENSORFLOW=gpu
endif

# examples/ray_train.py with two workers of Ray Train, which it installs.
test-ray: $(RAY)
	$(BIN)/python -m pytest tests/ray

# Jobs on several hosts, whose network is cut: namespaces of this machine, so it
# needs Linux, root, iproute2 and openssh-server; else each says what is missing.
test-cluster: engines
	$(BIN)/python -m pytest -m cluster tests/cluster

# The tests of `make check`, and all of the contract, on corners of the versions
# that pyproject.toml allows, each on a Python that its TensorFlow has.
test-matrix: $(STAMP)
	$(BIN)/nox $(NOX_ARGS) -- $(PYTEST_ARGS)

# The same on the newest Keras and TensorFlow, be they allowed or not; with
# NEXT_ARGS=--pre on those that are not yet released.
test-next: $(STAMP)
	$(BIN)/nox --session newest $(NOX_ARGS) -- $(NEXT_ARGS) $(PYTEST_ARGS); \
	code=$$?; cat .nox/newest.txt; exit $$code

# Changes of single operators, some of which no test may notice: the diffs of
# those are printed, for you to read.
MUTANTS_ARGS ?= partition jobs/rendezvous --count 100
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[$(TENSORFLOW),mutants]'
	$(BIN)/python -m tests.mutants $(MUTANTS_ARGS)

# The inner loop, in about a minute: some tests of most rooms that do not
# need Horovod, and the contract's hardest cases.
check: $(STAMP) lint
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m core

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Not in lint, since it takes longer than all of that. It need not ask whether
# there is a newer version of itself.
types: $(STAMP)
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

# On a model of your own with BENCH_ARGS="--models my_module:build".
bench: $(STAMP)
	$(BIN)/keras-towers bench $(BENCH_ARGS)

# With Horovod, and with PyTorch and JAX where they are installed.
field: engines
	$(BIN)/python -m benchmarks.field $(FIELD_ARGS)

# Into site/; a link to nowhere is an error.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[$(TENSORFLOW),dev]'
	touch $@

# Each compiled for some minutes once, then taken from the user's cache. BytePS's
# build uses one core only.
engines: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 $(HOROVOD) $(BYTEPS)

$(HOROVOD): $(STAMP)
	$(BIN)/keras-towers install horovod
	touch $@

$(BYTEPS): $(STAMP)
	$(BIN)/keras-towers install byteps
	touch $@

# KerasHub without what it requires: tensorflow-text would install the package
# tensorflow over tensorflow-cpu, and only tokenizers need it. What importing it
# needs is in the extra.
$(ECOSYSTEM): $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[$(TENSORFLOW),ecosystem]'
	$(BIN)/python -m pip install --quiet --no-deps keras-hub
	touch $@

$(RAY): $(HOROVOD)
	$(BIN)/python -m pip install --quiet 'ray[train]>=2.60,<2.61'
	touch $@

# The site is made from the source alone, without TensorFlow.
$(DOCS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-gpu .nox dist build site .mypy_cache .pytest_cache .ruff_cache
