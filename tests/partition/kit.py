"""Runs what one device does on one device and laid out over towers."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import tensorflow as tf

from keras_towers import compat
from keras_towers.partition import lay_out
from keras_towers.partition.emission import emit, graph_of
from keras_towers.partition.layouts import (
    PARTIAL,
    REPLICATED,
    BelowLimit,
    Partial,
    Sharded,
)
from keras_towers.partition.program import Function
from keras_towers.partition.sizes import UNKNOWN, Size

# Numbers of examples of the towers: uneven, one without, one that is alone.
TOWERS = ((3, 0, 2), (1, 4), (0, 1, 0))
FEW = ((3, 0, 2), (0, 1, 0))
_numbers = itertools.count()
_SPECIAL = (tf.resource, tf.variant)
# One row is broadcast, which changes what the gradient sums over. Of the last
# two TensorFlow itself says what is not so.
_NOT_CLAIMED = (
    *("Const", "BroadcastGradientArgs"),
    *("AccumulateNV2", "ExtractVolumePatches"),
)
# Graphs run as they were laid out, and are too small to be worth rewriting.
_AS_IT_IS = tf.compat.v1.ConfigProto()
_AS_IT_IS.graph_options.rewrite_options.disable_meta_optimizer = True


@dataclasses.dataclass(frozen=True)
class Input:
    """An input: its layout, and its shape, in which -1 is the axis of rows.

    Attributes:
        hidden: other axes of which the trace does not know the size.
    """

    layout: object
    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0
    hidden: tuple[int, ...] = ()

    @property
    def spec(self):
        sizes = [
            None if size == -1 or axis in self.hidden else size
            for axis, size in enumerate(self.shape)
        ]
        return tf.TensorSpec(sizes, self.dtype)

    def made(self, count, generator):
        """Return entries for a number of examples."""
        rows = getattr(self.layout, "count", 0) * count
        shape = [rows if size == -1 else size for size in self.shape]
        return entries(generator, shape, self.dtype, self.low, self.high)

    def one(self, whole):
        """Return what one device is given."""
        return whole

    def parts(self, whole, counts):
        """Return what each tower has."""
        if self.layout == REPLICATED:
            return [whole] * len(counts)
        if isinstance(self.layout, Partial):
            rest = np.zeros_like(whole)
            parts = [(whole * 0.25).astype(whole.dtype) for _ in counts[1:]]
            for part in parts:
                rest = rest + part
            return [whole - rest, *parts]
        axis, blocks = self.layout.axis, self.layout.blocks
        size = whole.shape[axis]
        split = whole.reshape(
            *whole.shape[:axis],
            blocks,
            size // blocks,
            *whole.shape[axis + 1 :],
        )
        ends = np.cumsum(counts)[:-1] * self.layout.rows
        return [
            part.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 1 :])
            if part.size
            else np.zeros(
                [
                    *whole.shape[:axis],
                    blocks * part.shape[axis + 1],
                    *whole.shape[axis + 1 :],
                ],
                whole.dtype,
            )
            for part in np.split(split, ends, axis + 1)
        ]


def rows(*shape, blocks=1, rows=1, **options):
    """An input with rows of examples where the shape has -1."""
    return Input(Sharded(shape.index(-1), None, blocks, rows), shape, **options)


def same(*shape, **options):
    """An input that all have."""
    return Input(REPLICATED, shape, **options)


def part(*shape, **options):
    """An input of which each tower has a part of a sum."""
    return Input(PARTIAL, shape, **options)


def entries(generator, shape, dtype, low, high):
    """Draw the entries of a tensor."""
    if dtype == "string":
        return generator.choice([b"a", b"bb", b"a1"], shape)
    if dtype == "bool":
        return generator.random(shape) < 0.5
    if np.issubdtype(dtype, np.integer):
        return generator.integers(int(low), int(high) + 1, shape).astype(dtype)
    found = generator.uniform(low, high, shape)
    if np.issubdtype(dtype, np.complexfloating):
        found = found + 1j * generator.uniform(low, high, shape)
    return np.asarray(found).astype(dtype)


def traced(function, *given):
    """Return the graph of a function, and its outputs."""
    graph = compat.FuncGraph("one_device")
    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(g.dtype, g.spec.shape) for g in given
        ]
        found = tf.nest.flatten(function(*inputs), expand_composites=True)
        outputs = [tf.convert_to_tensor(o) for o in found if o is not None]
    graph.inputs, graph.outputs = inputs, outputs
    graph.structured_outputs = outputs
    return graph


def on_towers(program, parts, counts, ranks=1, copies=(), more=()):
    """Run a program; return its results.

    Args:
        program: it.
        parts: for each of N inputs of the graph what each tower has, or each
            process, or all.
        counts: the towers' numbers of examples.
        ranks: the number of processes. All towers belong to the first; the
            results are those of the last.
        copies: what each tower has of mirrored variables, by their inputs.
        more: pairs of other tensors of the program and what all have of them.
    """
    given, towers = program.inputs, [{} for _ in counts]
    total = tf.constant(sum(counts), tf.int64)
    processes = [{given.total: total} for _ in range(ranks)]
    for tensor, every in zip(given.of_graph, parts, strict=True):
        those = towers if tensor.on_towers else processes
        if len(every) == 1:
            every = every * len(those)
        for own, value in zip(those, every, strict=tensor.on_towers):
            own[tensor] = tf.convert_to_tensor(value)
    for index, tensor in given.copies.items():
        for own, handle in zip(towers, copies[index], strict=True):
            own[tensor] = tf.convert_to_tensor(handle)
    for tensor, value in more:
        for own in towers if tensor.on_towers else processes:
            own[tensor] = tf.constant(value, tensor.dtype)
    for name, tensor in given.sizes.items():
        index, axis = map(int, name.split("."))
        size = tf.constant(parts[index][0].shape[axis], tf.int64)
        for common in processes:
            common[tensor] = size
    for k, own in enumerate(towers):
        own[given.start] = tf.constant(sum(counts[:k]), tf.int64)
        own[given.is_first] = tf.constant(k == 0)
    for level in range(program.levels + 1):
        ops = [
            o
            for o in program.operations
            if o.level == level and not o.is_repeated
        ]
        for rank, common in enumerate(processes):
            own_ops = [
                o for o in ops if not o.on_towers and not (rank and o.at_root)
            ]
            _emit(own_ops, program, {}, common)
        for own in towers:
            own_ops = [o for o in ops if o.on_towers]
            _emit(own_ops, program, processes[0], own)
        for exchange in program.exchanges:
            if exchange.given.level == level:
                _exchange(exchange, towers, processes)
    last = processes[-1]
    return [
        last[t] if t in last else emit([], last, [t])[0]
        for t in program.results
    ]


def _emit(operations, program, common, own):
    made = [tensor for o in operations for tensor in o.outputs]
    given = {**common, **own}
    if any(o.has_effect and o.on_towers for o in operations):
        # As a function, which has to keep to their order.
        inputs = _used(operations, given)
        level = Function(inputs, made, operations)
        graph = graph_of(level, program.graphs)
        name = f"level_{next(_numbers)}"
        function = compat.function_module.from_func_graph(name, graph, {})
        found = function.call_flat(*(given[t] for t in inputs))
    else:
        found = emit(operations, given, made, program.graphs)
    own.update(zip(made, found, strict=True))


def _used(operations, given):
    """What operations use that is given, also by what is repeated."""
    waiting, used = [t for o in operations for t in o.inputs], {}
    while waiting:
        tensor = waiting.pop()
        if tensor in given:
            used[tensor] = None
        elif tensor.operation.is_repeated:
            waiting += tensor.operation.inputs
    return list(used)


def _exchange(exchange, towers, processes):
    given, result = exchange.given, exchange.result
    if exchange.kind == "root":
        (whole,) = emit([], processes[0], [given])
    else:
        every = [
            emit([], {**processes[0], **own}, [given])[0] for own in towers
        ]
        if exchange.kind == "before":
            before = tf.zeros_like(every[0])
            for own, value in zip(towers, every, strict=True):
                own[result] = before
                before = before + value
            return
        if exchange.kind == "sum":
            whole = tf.add_n(every)
        elif exchange.kind == "gather":
            whole = tf.concat(every, exchange.axis)
        else:
            whole = every[0]
    for common in processes:
        common[result] = whole


def with_gradients(function):
    """Return what gives the results of a function, and their gradients."""

    def both(*inputs):
        floats = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            found = tf.nest.flatten(function(*inputs))
            total = tf.add_n(
                [tf.reduce_sum(tf.sin(y)) for y in found if y.dtype.is_floating]
            )
        return [*found, *tape.gradient(total, floats)]

    return both


class Refused(Exception):
    """One device cannot compute it either."""


def check(function, *given, towers=TOWERS, seed=0, tolerance=1e-5, **options):
    """Check that towers compute what one device does; return the program.

    Args:
        function: takes tensors, and returns some.
        *given: its inputs.
        towers: numbers of examples, for some towers, several times.
        seed: of the entries.
        tolerance: how far entries may be off.
        **options: those of ``lay_out``.
    """
    graph = traced(function, *given)
    layouts = [g.layout for g in given]
    fetched = [t for t in graph.outputs if t.dtype not in _SPECIAL]
    program, values = lay_out(graph, layouts, fetched, **options)
    generator = np.random.default_rng(seed)
    for counts in towers:
        wholes = [g.made(sum(counts), generator) for g in given]
        parts = [
            g.parts(whole, counts)
            for g, whole in zip(given, wholes, strict=True)
        ]
        ones = [g.one(whole) for g, whole in zip(given, wholes, strict=True)]
        wanted = _one_device(graph, fetched, ones)
        _check_claims(graph, values, ones, sum(counts))
        found = _run(program, parts, counts)
        for own, right in zip(found, wanted, strict=True):
            _assert_alike(own, right, tolerance)
    return program


def check_divided(function, *given, **options):
    """Check a function of which nothing is computed once."""
    program = check(function, *given, **options)
    assert not once(program), once(program)
    return program


def _check_claims(graph, values, wholes, count):
    """Check shapes and entries that were known before anything ran."""
    tensors = [
        tensor
        for operation in graph.get_operations()
        for tensor in operation.outputs
        if tensor.dtype not in _SPECIAL
        and tensor.name in values
        and graph.is_fetchable(operation)
        and operation.type not in _NOT_CLAIMED
    ]
    symbols = {}
    for tensor, array in zip(
        tensors, _one_device(graph, tensors, wholes), strict=True
    ):
        value, array = values[tensor.name], np.asarray(array)
        pairs = []
        if value.shape is not None:
            assert len(value.shape) == array.ndim, (tensor, value.shape)
            pairs += zip(value.shape, array.shape, strict=True)
        if value.known is not None:
            assert value.known.shape == array.shape, (tensor, value.known)
            pairs += zip(value.known.flat, array.flat, strict=True)
        for claimed, actual in pairs:
            number = evaluated(claimed, count)
            assert number is None or number == actual, (tensor, claimed)
            if isinstance(claimed, Size) and len(claimed.powers) == 1:
                # The same symbol is the same size everywhere.
                (power,) = claimed.powers
                whole = claimed.number * symbols.setdefault(
                    power, actual / claimed.number
                )
                assert whole == actual, (tensor, claimed)
        if isinstance(value.meaning, BelowLimit):
            inside = (array >= 0) & (array < value.meaning.limit)
            assert inside.all(), (tensor, value.meaning)


def evaluated(claimed, count):
    """Return a size for a number of examples; None: it is not known."""
    if isinstance(claimed, Size):
        if any(symbol != "n" for symbol, _ in claimed.powers):
            return None
        return claimed.number * count ** dict(claimed.powers).get("n", 0)
    return None if claimed is UNKNOWN else claimed


def _one_device(graph, fetched, wholes):
    with tf.compat.v1.Session(graph=graph, config=_AS_IT_IS) as session:
        feed = dict(zip([t.name for t in graph.inputs], wholes, strict=True))
        try:
            return session.run([t.name for t in fetched], feed)
        except tf.errors.OpError as error:
            raise Refused(str(error)) from error


def _run(program, parts, counts):
    graph = tf.Graph()
    with graph.as_default():
        results = on_towers(program, parts, counts)
    with tf.compat.v1.Session(graph=graph, config=_AS_IT_IS) as session:
        return session.run(results)


def _assert_alike(found, right, tolerance):
    right = np.asarray(right)
    assert found.shape == right.shape, (found.shape, right.shape)
    if right.dtype.kind in "fc":
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance)
    else:
        np.testing.assert_array_equal(found, right)


def kinds(program):
    """How many exchanges of each kind a program has."""
    return Counter(exchange.kind for exchange in program.exchanges)


def once(program):
    """How many operations of each type are computed once."""
    return Counter(operation.type for operation in program.once)
