"""Runs a step on one device and laid out over towers, and compares.

``check_on_towers`` is what most tests call::

    check_on_towers(lambda x, w: x @ w, sharded(-1, 4), replicated(4, 3))
"""

import dataclasses
import itertools
import threading
import types
from collections import Counter

import numpy as np
import tensorflow as tf

from keras_towers.fit.places import Places, Ranks
from keras_towers.fit.ranks.step_order import StepOrder
from keras_towers.fit.step.graph.placed_tensors import PlacedTensors
from keras_towers.fit.step.graph.tower_program import TowerProgram
from keras_towers.foundation import compat
from keras_towers.partition import partition_graph
from keras_towers.partition.ir import axes
from keras_towers.partition.ir.layouts import (
    PARTIAL,
    REPLICATED,
    Partial,
    RowSplits,
    Sharded,
)
from keras_towers.partition.ir.program import Program
from keras_towers.partition.ir.sizes import UNKNOWN, Size
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.ir.values import BelowLimit
from keras_towers.partition.layout.conversions import LayoutOptions
from keras_towers.partition.timeline.gathers import place_earliest
from keras_towers.partition.timeline.schedule import BatchSplit, schedule
from keras_towers.transport import SingleProcess
from tests.partition.order import check_order
from tests.reduction.ranks import on_ranks

# Numbers of examples of the towers: uneven, one without, one that is alone.
TOWERS = ((3, 0, 2), (1, 4), (0, 1, 0))
FEW = ((3, 0, 2), (0, 1, 0))
_HOST = "/device:CPU:0"
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
        examples: their number, if the trace knows it.
    """

    layout: object
    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float = -1.0
    high: float = 1.0
    hidden: tuple[int, ...] = ()
    examples: int | None = None

    @property
    def spec(self):
        sizes = [
            None if axis in self.hidden else size
            for axis, size in enumerate(self._shape_of(self.examples))
        ]
        return tf.TensorSpec(sizes, self.dtype)

    def _shape_of(self, count):
        """The shape for a number of examples, which may be None."""
        rows = getattr(self.layout, "rows_per_unit", 0)
        rows = None if count is None else rows * count
        return [rows if size == -1 else size for size in self.shape]

    def draw(self, count, generator):
        """Draw the input of one device for a number of examples."""
        shape = self._shape_of(count)
        return draw_entries(generator, shape, self.dtype, self.low, self.high)

    def for_one_device(self, whole):
        """Return the tensor that one device gets."""
        return whole

    def split(self, whole, counts):
        """Return the tensor of each tower."""
        if self.layout == REPLICATED:
            return [whole] * len(counts)
        if isinstance(self.layout, Partial):
            # Parts of small integers must not all be zero.
            more = np.issubdtype(self.dtype, np.integer)
            part = (whole * 0.25 + more).astype(whole.dtype)
            parts = [part for _ in counts[1:]]
            return [whole - sum(parts), *parts]
        axis, blocks = self.layout.axis, self.layout.blocks
        before, (size, *after) = whole.shape[:axis], whole.shape[axis:]
        of_blocks = whole.reshape(*before, blocks, size // blocks, *after)
        ends = np.cumsum(counts)[:-1] * self.layout.rows
        return [
            part.reshape(*before, blocks * part.shape[axis + 1], *after)
            for part in np.split(of_blocks, ends, axis + 1)
        ]


def sharded(*shape, blocks=1, rows=1, **options):
    """An input whose rows are examples, along the axis of size -1."""
    return Input(Sharded(shape.index(-1), None, blocks, rows), shape, **options)


def replicated(*shape, **options):
    """An input that is the same on all towers."""
    return Input(REPLICATED, shape, **options)


def partial_sum(*shape, **options):
    """An input of which each tower has one term of a sum."""
    return Input(PARTIAL, shape, **options)


@dataclasses.dataclass(frozen=True)
class _RaggedPart(Input):
    """The values or the splits of ragged rows; both draw the same rows."""

    width: int = 1

    def draw(self, count, generator):
        drawn = np.random.default_rng([count, 5])
        lengths = drawn.integers(0, 4, count)
        lengths[-1] = 0 if count > 2 else lengths[-1]
        return [drawn.uniform(-1, 1, (k, self.width)) for k in lengths]

    def for_one_device(self, whole):
        if self.layout == RowSplits("r"):
            lengths = [len(row) for row in whole]
            return np.cumsum([0, *lengths]).astype("int64")
        none = np.zeros((0, self.width))
        return np.concatenate([none, *whole]).astype("float32")

    def split(self, whole, counts):
        ends = itertools.pairwise(np.cumsum([0, *counts]))
        return [self.for_one_device(whole[a:b]) for a, b in ends]


def ragged(width):
    """The values and the splits of ragged rows, one for each example."""
    return (
        _RaggedPart(Sharded(0, "r"), (-1, width), width=width),
        _RaggedPart(RowSplits("r"), (-1,), "int64", width=width),
    )


def draw_entries(generator, shape, dtype, low, high):
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


def trace(function, *given):
    """Trace a function; return its graph, with ``inputs`` and ``outputs``.

    What it captures, such as the handles of variables, are its last inputs.
    """
    graph = compat.FuncGraph("one_device")
    with graph.as_default():
        inputs = [
            tf.compat.v1.placeholder(g.dtype, g.spec.shape) for g in given
        ]
        found = tf.nest.flatten(function(*inputs), expand_composites=True)
        outputs = [tf.convert_to_tensor(o) for o in found if o is not None]
    captured = [inside for _, inside in graph.captures]
    graph.inputs, graph.outputs = [*inputs, *captured], outputs
    graph.structured_outputs = outputs
    return graph


def laid_out(function, *given, captured=REPLICATED, handed=None, **options):
    """Trace a function, and return its program, which nothing runs.

    Args:
        function: the step, a function of tensors.
        *given: its inputs, as for ``check_on_towers``.
        captured: the layout of what it captures.
        handed: layouts of what is handed over to updates, by their names.
        **options: the attributes of ``LayoutOptions``.
    """
    graph = trace(function, *given)
    layouts = [g.layout for g in given] + [captured] * len(graph.captures)
    options = LayoutOptions(**options)
    outputs = _fetched(graph)
    handed = handed or {}
    return partition_graph(graph, layouts, outputs, handed, options=options)


def earliest(program, towers=2, rows=8, gather_bytes=2**29):
    """Return the timeline of a program that does everything early."""
    sizes = TensorSizes(program, towers, rows)
    return place_earliest(program, sizes, gather_bytes)


def by_hand(builder, *inputs, results=(), copies=None, before=None):
    """Return a program of what a builder has added."""
    given = types.SimpleNamespace(of_graph=inputs, copies=copies or {})
    return Program(given, builder.events, before or {}, results, [], {}, {})


def _fetched(graph):
    """The outputs of a graph that a session can return."""
    return [t for t in graph.outputs if t.dtype not in _SPECIAL]


def results_of(program):
    """The values of the results of a traced function."""
    return [program.values[t.name] for t in program.graphs[0].outputs]


def on_towers(
    program, parts, counts, ranks=1, copies=(), more=(), scheduled=earliest
):
    """Run a program as steps do; return the results of the last process.

    Args:
        program: the program.
        parts: for each input of the graph its value on each tower, or in each
            process; one value is that of all.
        counts: the towers' numbers of examples.
        ranks: the number of processes that share the towers: threads.
        copies: for mirrored variables, by their inputs, the towers' handles.
        more: pairs of other tensors of the program and their values.
        scheduled: decides when the program does what.
    """
    given, towers = program.inputs, [{} for _ in counts]
    total = tf.constant(sum(counts), tf.int64)
    processes = [{given.total: total} for _ in range(ranks)]
    for tensor, values in zip(given.of_graph, parts, strict=True):
        owners = towers if "towers" in tensor.axes else processes
        if len(values) == 1:
            values = values * len(owners)
        for owner, value in zip(owners, values, strict=owners is towers):
            owner[tensor] = tf.convert_to_tensor(value)
    for index, tensor in given.copies.items():
        for tower, handle in zip(towers, copies[index], strict=True):
            tower[tensor] = tf.convert_to_tensor(handle)
    for tensor, value in more:
        for owner in towers if "towers" in tensor.axes else processes:
            owner[tensor] = tf.constant(value, tensor.dtype)
    for name, tensor in given.sizes.items():
        index, axis = map(int, name.split("."))
        size = tf.constant(parts[index][0].shape[axis], tf.int64)
        for process in processes:
            process[tensor] = size
    for k, tower in enumerate(towers):
        tower[given.start] = tf.constant(sum(counts[:k]), tf.int64)
        tower[given.is_first] = tf.constant(k == 0)
    graph, timeline = tf.compat.v1.get_default_graph(), scheduled(program)
    check_order(timeline)

    def run(transport):
        shares = np.array_split(np.arange(len(towers)), ranks)
        own = [towers[k] for k in shares[transport.rank]]
        devices, order = [_HOST] * len(own), StepOrder(transport)
        with graph.as_default():
            places = Places(Ranks(step=transport), [[d] for d in devices])
            runner = TowerProgram(timeline, "called", places, order)
            inputs = PlacedTensors(places)
            for tensor, value in processes[transport.rank].items():
                inputs.shared[tensor] = value
            for here in inputs.at_places(axes.TOWERS):
                for tensor, value in own[here.tower].items():
                    here[tensor] = value
            return runner.add_to_graph(inputs)

    one_at_a_time = threading.Lock()

    def run_as_rank(transport):
        # Real ranks number their keys in separate graphs.
        gather, keys = transport.gather_objects, itertools.count()

        def gather_from_all(value, key):
            one_at_a_time.release()
            try:
                return gather(value, next(keys))
            finally:
                one_at_a_time.acquire()

        transport.gather_objects = gather_from_all
        with one_at_a_time:
            return run(transport)

    if ranks == 1:
        return run(SingleProcess())
    results, _ = on_ranks(ranks, run_as_rank)
    return results[-1]


def with_gradients(function):
    """Return a function that also returns the gradients of its results."""

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


class OneDeviceFails(Exception):
    """One device cannot compute it either."""


def check_on_towers(
    function,
    *given,
    towers=TOWERS,
    seed=0,
    tolerance=1e-5,
    scheduled=earliest,
    **options,
):
    """Check that towers compute what one device does; return the program.

    Args:
        function: the step, a function of tensors.
        *given: its inputs, as ``sharded`` and the functions below it make them.
        towers: the number of examples of each tower, for several runs.
        seed: the seed of the entries, which differ in each run.
        tolerance: the largest difference allowed.
        scheduled: decides when a program computes what.
        **options: the attributes of ``LayoutOptions``.
    """
    program = laid_out(function, *given, **options)
    check_order(schedule(program, BatchSplit(2, 8)))
    graph = program.graphs[0]
    fetched = _fetched(graph)
    generator = np.random.default_rng(seed)
    for counts in towers:
        drawn = [(g, g.draw(sum(counts), generator)) for g in given]
        inputs = [g.for_one_device(whole) for g, whole in drawn]
        wanted = _one_device(graph, fetched, inputs)
        _check_claims(graph, program.values, inputs, sum(counts))
        parts = [g.split(w, counts) for g, w in drawn]
        found = _run(program, parts, counts, scheduled)
        for n, (own, right) in enumerate(zip(found, wanted, strict=True)):
            where = f"output {n}, towers with {counts} examples"
            _assert_equal(own, right, tolerance, where)
    return program


def check_divided(function, *given, **options):
    """Check a function, and that nothing of it is computed once."""
    program = check_on_towers(function, *given, **options)
    assert not computed_once(program), computed_once(program)
    return program


def _check_claims(graph, values, inputs, count):
    """Check shapes and entries that were known before anything ran."""
    tensors = [
        tensor
        for operation in graph.get_operations()
        for tensor in operation.outputs
        if tensor.dtype not in _SPECIAL
        and tensor.name in values
        and graph.is_fetchable(operation)
        and operation.type not in _NOT_CLAIMED
        # Kernels leave out what an attribute empties.
        and tensor.shape.num_elements() != 0
    ]
    symbols = {}
    for tensor, array in zip(
        tensors, _one_device(graph, tensors, inputs), strict=True
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
            if isinstance(actual, np.int32) and (number or 0) >= 2**31:
                # A multiple of the examples wraps around.
                assert (number - int(actual)) % 2**32 == 0, (tensor, claimed)
                continue
            assert number is None or number == actual, (
                f"{tensor}: {claimed} was claimed, but it is {actual} of "
                f"{count} examples"
            )
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


def _one_device(graph, fetched, inputs):
    with tf.compat.v1.Session(graph=graph, config=_AS_IT_IS) as session:
        feed = dict(zip([t.name for t in graph.inputs], inputs, strict=True))
        try:
            return session.run([t.name for t in fetched], feed)
        except tf.errors.OpError as error:
            raise OneDeviceFails(str(error)) from error


def _run(program, parts, counts, scheduled):
    graph = tf.Graph()
    with graph.as_default():
        results = on_towers(program, parts, counts, scheduled=scheduled)
    with tf.compat.v1.Session(graph=graph, config=_AS_IT_IS) as session:
        return session.run(results)


def _assert_equal(found, right, tolerance, where):
    # A single string has no shape.
    found, right = np.asarray(found), np.asarray(right)
    assert found.shape == right.shape, (where, found.shape, right.shape)
    if right.dtype.kind in "fc":
        np.testing.assert_allclose(
            found, right, tolerance, tolerance, err_msg=where
        )
    else:
        np.testing.assert_array_equal(found, right, where)


def exchange_counts(program):
    """How many exchanges of each kind a program has."""
    return Counter(exchange.kind for exchange in program.exchanges)


def computed_once(program):
    """How many operations of each type are computed once."""
    return Counter(operation.type for operation in program.computed_once)
