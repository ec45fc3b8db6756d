# Every target makes its own environment in .venv when there is none, and
# installs again only when pyproject.toml has changed.

PYTHON ?= python3
TENSORFLOW ?= cpu
# A process for each of two cores; tests/kit/schedule.py says what runs where.
PYTEST_ARGS ?= -n 2 --dist loadfile
BIN := .venv/bin
STAMP := .venv/installed-$(TENSORFLOW)
HOROVOD := .venv/horovod-$(TENSORFLOW)

.PHONY: demo test check lint bench clean

demo: $(STAMP)
	$(BIN)/python examples/digits.py

test: $(HOROVOD) lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The inner loop, in less than a minute and a half: some tests of every room
# that does not need Horovod, and the contract's hardest cases.
check: $(STAMP) lint
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m core

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/keras-towers bench $(BENCH_ARGS)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable '.[$(TENSORFLOW),dev]'
	touch $@

# Compiled for some minutes once, then taken from the user's cache.
$(HOROVOD): $(STAMP)
	$(BIN)/keras-towers install horovod
	touch $@

clean:
	rm -rf .venv dist build .mypy_cache .pytest_cache .ruff_cache
