"""Compares what the rules say with what happens: split, and whole.

A tensor of a given kind is made for one device and for towers with different
numbers of examples. A function of such tensors is traced once. What the
analysis says of its outputs, and of everything on the way to them, has to hold
of the numbers.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from keras_towers.partition.sizes import ONE_MORE, UNKNOWN, Size, is_summed
from keras_towers.splitting.interpreter import Interpreter
from keras_towers.splitting.places import of_ragged
from keras_towers.splitting.values import Kind, Rows, Value
from tests.splitting.kit_numbers import check_parts, made

# Numbers of examples of the towers: uneven, and one that is alone.
TOWERS = ((5, 2), (2, 3, 1))
_SPECIAL = (tf.resource, tf.variant)
# The last ones return other axes where a size is 1: a sum over them is none.
_NOT_COMPARED = ("Placeholder", "Const", "BroadcastGradientArgs")
# Graphs run as they were analysed, and are too small to be worth rewriting.
_AS_IT_IS = tf.compat.v1.ConfigProto()
_AS_IT_IS.graph_options.rewrite_options.disable_meta_optimizer = True


@dataclasses.dataclass(frozen=True)
class Given:
    """An input: its kind, and its shape, in which -1 is the examples' axis."""

    value: Value
    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0

    @property
    def spec(self):
        sizes = [None if size == -1 else size for size in self.shape]
        return tf.TensorSpec(sizes, self.dtype)

    @property
    def described(self):
        rows = self.value.rows
        size = ONE_MORE if rows is None else rows.count * rows.of_each
        sizes = [size if s == -1 else s for s in self.shape]
        return dataclasses.replace(self.value, shape=tuple(sizes))


def rows(*shape, degree=0, outer=1, inner=1, **options):
    """An input with rows of examples where the shape has -1."""
    place = Rows(shape.index(-1), outer, inner)
    return Given(Value(Kind.ROWS, degree, place), shape, **options)


def ragged(*shape):
    """Inputs that are the entries and the row splits of ragged rows."""
    values, splits = of_ragged(0, shape)
    return Given(values, (-1, *shape)), Given(splits, (-1,), dtype="int64")


def same(*shape, degree=0, **options):
    """An input that all towers have."""
    return Given(Value(Kind.SAME, degree), shape, **options)


def total(*shape, degree=0):
    """An input that is a sum over examples."""
    return Given(Value(Kind.SUM, degree), shape)


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of tensors, and what the analysis says of it.

    Attributes:
        run: returns its outputs, and all tensors on the way to them.
        values: what they are.
        count: the number of its outputs.
        types: the types of its operations.
        interpreter: the analysis.
    """

    run: Any
    values: list[Value]
    count: int
    types: frozenset[str]
    interpreter: Interpreter


def traced(function, *given):
    """Trace a function and analyse it."""
    graph = tf.__internal__.FuncGraph("tested")
    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(g.dtype, g.spec.shape) for g in given
        ]
        outputs = tf.nest.flatten(function(*inputs))
        outputs = [tf.convert_to_tensor(o) for o in outputs if o is not None]
    graph.inputs = inputs
    graph.outputs = outputs + [
        tensor
        for operation in graph.get_operations()
        if operation.type not in _NOT_COMPARED and graph.is_fetchable(operation)
        for tensor in operation.outputs
        if tensor.dtype not in _SPECIAL
    ]
    interpreter = Interpreter({})
    values = interpreter.call(graph, [g.described for g in given])
    session = tf.compat.v1.Session(graph=graph, config=_AS_IT_IS)
    run = session.make_callable(
        [tensor.name for tensor in graph.outputs],
        [tensor.name for tensor in inputs],
    )
    types = frozenset(operation.type for operation in _operations(graph))
    return Traced(run, values, len(outputs), types, interpreter)


def _operations(graph):
    found = list(graph.get_operations())
    for function in graph._functions.values():
        inner = getattr(function, "graph", None)
        if inner is not None:
            found += _operations(inner)
    return found


def check(function, *given, towers=TOWERS, seed=0, contains=None):
    """Check what the analysis says of a function; return what it says.

    Args:
        function: takes tensors, and returns some.
        *given: what they are.
        towers: the towers' numbers of examples, several times.
        seed: of the entries.
        contains: a type of operation that has to be in it.
    """
    trace = traced(function, *given)
    assert contains is None or contains in trace.types, sorted(trace.types)
    generator = np.random.default_rng(seed)
    order = trace.interpreter.layouts.order
    for counts in towers:
        _compare(
            trace, [made(g, counts, generator, order) for g in given], counts
        )
    return trace.values[: trace.count]


def _compare(trace, inputs, counts):
    """Compare what is said of a trace with what it does."""
    every = [sum(counts), *counts]
    runs = [
        trace.run(*arrays)
        for arrays in zip(*([m.whole, *m.parts] for m in inputs), strict=True)
    ]
    # What sizes that follow from the data are, on one device and the towers.
    sizes = [{} for _ in every]
    for given, *found in zip(trace.values, *runs, strict=True):
        value = _in_order(trace, given)
        whole, *parts = map(np.asarray, found)
        for array, count, own in zip(
            (whole, *parts), every, sizes, strict=True
        ):
            _check_sizes(value, array, count, own)
        check_parts(value, whole, parts, counts)


def _in_order(trace, value):
    """Give the rows of random numbers the order that they got."""
    if value.rows is None:
        return value
    place = trace.interpreter.layouts.resolved(value.rows)
    return dataclasses.replace(value, rows=place)


def _check_sizes(value, array, count, sizes):
    """Check the shape and the entries that are known."""
    if count == 1 or (value.kind is Kind.OTHER and not value.grows):
        # One example is broadcast, which changes the shapes of nothing else.
        return
    pairs = []
    if value.shape is not None:
        assert len(value.shape) == array.ndim, (value, value.shape, array.shape)
        pairs += list(zip(value.shape, array.shape, strict=True))
    if value.known is not None:
        pairs += list(zip(value.known.flat, array.flat, strict=True))
    for said, actual in pairs:
        number = evaluated(said, count)
        if is_summed(said):
            own = sizes.setdefault(said.powers[0][0], actual // said.number)
            number = said.number * own
        assert number is None or number == actual, (value, said, actual)


def evaluated(said, count):
    """Return a size for a number of examples; None: it is not known."""
    if said is None or said is UNKNOWN:
        return None
    if not isinstance(said, Size):
        return said
    if any(symbol != "n" for symbol, _ in said.powers):
        return None
    return said.number * count ** said.power("n")


def proven(function, *given, **options):
    """Check a function of one output, of which something has to be known."""
    (value,) = check(function, *given, **options)
    assert value.kind is not Kind.OTHER, value
    return value


def refused(function, *given, **options):
    """Check that nothing is said of a function; return why."""
    (value,) = check(function, *given, **options)
    assert value.reason is not None, value
    return value.reason.text


def gradients(function):
    """A function that returns the gradients of a mean, of its arguments."""

    def step(*given):
        return tf.gradients(tf.reduce_mean(function(*given) ** 2), given)

    return step


def loop(rounds, body, *start):
    """Return what a loop leaves, of which every round is given its number."""

    def once(k, *values):
        return (k + 1, *tf.nest.flatten(body(k, *values)))

    return tf.while_loop(lambda k, *_: k < rounds, once, (0, *start))[1:]
