"""The Python on every page runs as it stands.

A page's blocks share one namespace, in which ``x``, ``y`` and ``model`` are
those of the README's first example, with fewer examples. ``<!-- not run: why
-->`` above a block leaves it out; ``<!-- needs horovod -->`` does where there
is no such module.
"""

import importlib.util
import sys
import unittest.mock

import keras
import pytest

from keras_towers.partition.ir.registry import OPERATIONS
from tests.docs.pages import PAGES, ROOT, blocks, name_of
from tests.kit.sampling import sample_of

WITH_PYTHON = {
    name_of(page): found for page in PAGES if (found := blocks(page, "python"))
}
FIRST = WITH_PYTHON["README.md"][0]
EXAMPLES = 200


def runs_here(block):
    assert not block.note or block.needs or block.not_run, block
    there = not block.needs or importlib.util.find_spec(block.needs)
    return there and not block.not_run


def run(block, page, namespace):
    # Errors then name the page and the line.
    code = "\n" * (block.line - 1) + block.code
    exec(compile(code, ROOT / page, "exec"), namespace)


@pytest.fixture(scope="module")
def first_example():
    namespace = {"__name__": "a page"}
    run(FIRST, "README.md", namespace)
    return namespace


@pytest.fixture
def namespace(first_example, tmp_path, monkeypatch):
    """What the snippets of a page start with."""
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(1)
    model = keras.models.clone_model(first_example["model"])
    model.compile("adam", "mse")
    data = {name: first_example[name][:EXAMPLES] for name in ("x", "y")}
    with unittest.mock.patch.dict(OPERATIONS):
        yield {**first_example, **data, "model": model}
    keras.distribution.set_distribution(None)
    if horovod := sys.modules.get("keras_towers.horovod"):
        horovod.shutdown()


def test_the_first_example_trains(first_example):
    model, x, y = (first_example[name] for name in ("model", "x", "y"))
    assert model.evaluate(x, y, verbose=0) < 0.5 * y.var()


@pytest.mark.parametrize("page", sample_of(WITH_PYTHON, 4))
def test_python_runs(page, namespace):
    for block in WITH_PYTHON[page]:
        if block.code != FIRST.code and runs_here(block):
            run(block, page, namespace)
