# Every target makes its own environment in .venv when there is none, and
# installs again only when pyproject.toml has changed.

PYTHON ?= python3
TENSORFLOW ?= cpu
# Two processes, a file in one of them: TensorFlow's devices are set only once.
PYTEST_ARGS ?= -n 2 --dist loadfile
BIN := .venv/bin
STAMP := .venv/installed-$(TENSORFLOW)
HOROVOD := .venv/horovod-$(TENSORFLOW)

.PHONY: demo test bench clean

demo: $(STAMP)
	$(BIN)/python examples/digits.py

test: $(HOROVOD)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest $(PYTEST_ARGS)

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
	rm -rf .venv dist build .pytest_cache .ruff_cache
