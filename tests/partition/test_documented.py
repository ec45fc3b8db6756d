"""The docstrings of the package are true."""

import re

import pytest
import tensorflow as tf

from keras_towers import partition
from keras_towers.partition import partition_graph
from tests.partition.kit import exchange_counts, replicated, sharded, trace


def _rows_of_table(text):
    """The rows of the table in a docstring, as lists of words."""
    ruler = re.compile(r"^=+ .*=$", re.MULTILINE)
    _, _, body, _ = ruler.split(text)
    widths = [len(column) for column in ruler.search(text)[0].split("  ")]
    for line in body.strip().splitlines():
        cells = []
        for width in widths:
            cells.append(line[:width].strip())
            line = line[width + 2 :]
        yield cells


def _example(x, labels, w):
    with tf.GradientTape() as tape:
        tape.watch(w)
        scores = x @ w
        softmax = tf.nn.softmax(scores)
        losses = -tf.reduce_sum(labels * tf.math.log(softmax), -1)
        loss = tf.reduce_mean(losses)
    gradient = tape.gradient(loss, w)
    flat = tf.reshape(scores, [-1])
    twice = tf.concat([losses, losses], 0)
    size = tf.shape(losses)
    return x, labels, w, scores, losses, loss, gradient, flat, twice, size


def _lay_out_example(wanted):
    given = sharded(-1, 4), sharded(-1, 3), replicated(4, 3)
    graph = trace(_example, *given)
    outputs = [graph.outputs[k] for k in wanted]
    program = partition_graph(graph, [g.layout for g in given], outputs)
    return program, [program.values[t.name] for t in graph.outputs]


def test_the_example_has_the_layouts_that_its_table_shows():
    _, values = _lay_out_example(())
    found = []
    for value in values[:-1]:
        layout = value.layout
        counts = [getattr(layout, name, "") for name in ("blocks", "rows")]
        shape = ", ".join(map(str, value.shape))
        found.append([shape, type(layout).__name__, *map(str, counts)])
    table = list(_rows_of_table(partition.__doc__))
    assert [row[1:] for row in table] == found
    assert list(map(str, values[-1].known)) == ["n"]


def test_the_example_exchanges_two_sums_in_one_level():
    program, values = _lay_out_example((5, 6))
    assert exchange_counts(program) == {"sum": 2}
    assert program.levels == 1
    assert {values[k].whole.level for k in (5, 6)} == {1}
    assert not program.computed_once


_FILES = dict(
    re.findall(
        r"^\* ``(\w+)\.py``: (.*?)(?=^\*|^$)", rules.__doc__, re.M | re.S
    )
)


@pytest.mark.parametrize("file", _FILES)
def test_operations_have_their_rules_in_the_file_that_the_index_names(file):
    tables = (registry.RULES, registry.AXES, registry.NOTES)
    *_, names = _FILES[file].split(":")
    for name in names.split():
        registered = []
        for table in tables:
            functions = table.get(name, [])
            registered += (
                functions if isinstance(functions, list) else [functions]
            )
        modules = {function.__module__ for function in registered}
        assert f"{rules.__name__}.{file}" in modules, name


def test_the_index_names_all_files_with_rules():
    functions = [f for fs in registry.RULES.values() for f in fs]
    functions += registry.AXES.values()
    modules = {f.__module__.rpartition(".")[2] for f in functions}
    assert modules == set(_FILES)
