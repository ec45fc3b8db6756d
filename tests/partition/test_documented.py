"""The docstrings of the package are true."""

import ast
import collections
import pathlib
import re
import typing

import tensorflow as tf

from keras_towers import partition
from keras_towers.foundation import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.ir.registry import OPERATIONS, OperationFacts
from keras_towers.partition.layout import rules
from tests.partition.kit import (
    earliest,
    exchange_counts,
    replicated,
    sharded,
    trace,
)


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
    timeline = earliest(program)
    assert timeline.number_of_levels == 1
    assert {timeline.level_of(values[k].whole) for k in (5, 6)} == {1}
    assert not program.computed_once


def _types_of_rows():
    """The types that rows are added for, in the text of the rules."""
    for path in pathlib.Path(rules.__path__[0]).glob("*.py"):
        # ``operation`` itself, and what adds rows of a family.
        adding = {"operation"}
        for node in ast.parse(path.read_text()).body:
            inside = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            called = {ast.unparse(call.func) for call in inside}
            if isinstance(node, ast.FunctionDef) and called & adding:
                adding.add(node.name)
            elif isinstance(node, ast.Expr) and called & adding:
                yield from node.value.args[0].value.split()


def test_each_operation_has_one_row():
    found = collections.Counter(_types_of_rows())
    assert set(found.values()) == {1}
    assert found.keys() == OPERATIONS.keys()


def test_rows_say_what_may_be_said():
    for name in ("bounds", "factor", "memory", "work", "effect"):
        column = OperationFacts.__annotations__[name]
        words, _ = typing.get_args(eval(column, vars(typing)))
        said = {getattr(facts, name) for facts in OPERATIONS.values()}
        assert said == {None, *typing.get_args(words)}


def test_operations_of_rows_exist():
    missing = {t for t in OPERATIONS if compat.op_definition(t) is None}
    assert not missing
