"""Exchanges among devices: their values, and what their graphs say.

NCCL cannot run on CPUs: of it there is only the graph, and the reasons.
"""

import concurrent.futures
import types

import numpy as np
import pytest
import tensorflow as tf

from keras_towers.foundation.errors import TowerError
from keras_towers.reduction import collective_ops
from keras_towers.reduction.collective_ops import CollectiveOps, nccl_available
from keras_towers.reduction.collectives import Hierarchical, OnDevice, OnTowers
from keras_towers.reduction.packing import GradientPacker, Packed
from keras_towers.transport.messages import Rows
from tests.reduction.cases import (
    ON_CPUS,
    assert_placed,
    assert_sums,
    compiled,
    cpus,
    make_gradients,
    ops_of,
)

# ---- every reduction ---------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("towers", [3, 4])
@pytest.mark.parametrize("name", ON_CPUS)
def test_every_tower_gets_the_sum(name, towers):
    mode, devices = ON_CPUS[name](), cpus(towers)
    packer = GradientPacker(num_split=3, min_elements=2)
    reduce = mode.all_reduce
    for function in (reduce, Packed(mode, packer).all_reduce):
        step = compiled(function, devices)
        for seed in range(2):
            grads = make_gradients(towers, seed)
            assert_sums(step(grads), grads)
    results = reduce(grads, devices)
    assert_sums(results, grads)
    assert_placed(results, devices)


# Wholes, the axis of their rows, and how many each of three devices has.
ROWS = [
    ([7, 2], 0, [2, 3, 2]),
    ([2, 6, 3], 1, [2, 2, 2]),
    ([6], 0, [2, 2, 2]),
    ([2, 1], 0, [0, 1, 1]),
    ([0, 3], 0, [0, 0, 0]),
]
OF_ROWS = ("float32", "bfloat16", "complex64", "int32", "int8")


@pytest.mark.core
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ON_CPUS)
def test_rows_are_scattered_and_gathered_and_wholes_broadcast(name, packed):
    made = collectives = ON_CPUS[name]()
    if packed:
        made = Packed(collectives, GradientPacker(num_split=2, min_elements=9))
    devices, dtypes = cpus(3), [d for _ in ROWS for d in OF_ROWS]
    rows = [Rows(axis, counts) for _, axis, counts in ROWS for _ in OF_ROWS]
    draw = np.random.default_rng(0)
    wholes = [
        [
            tf.constant(draw.integers(-9, 9, shape), dtype)
            for shape, _, _ in ROWS
            for dtype in OF_ROWS
        ]
        for _ in devices
    ]

    @tf.function
    def step(wholes):
        own = made.reduce_scatter(wholes, devices, rows)
        unknown = [Rows(r.axis, list(map(tf.constant, r.counts))) for r in rows]
        same = made.reduce_scatter(wholes, devices, unknown)
        gathered = made.all_gather(own, devices, rows)
        if not tf.executing_eagerly():
            assert_placed(own, devices)
            assert_placed(gathered, devices)
        return own, same, gathered, made.broadcast(wholes[1], devices)

    def check(own, same, gathered, copies):
        for i, (whole, dtype) in enumerate(zip(wholes[0], dtypes, strict=True)):
            of_devices = [tf.cast(w[i], "complex128") for w in wholes]
            total = sum(map(np.asarray, of_devices))
            parts = tf.split(total, rows[i].counts, rows[i].axis)
            for k, _ in enumerate(devices):
                found = gathered[k][i], copies[k][i], own[k][i], same[k][i]
                wanted = total, of_devices[1], parts[k], parts[k]
                for one, other in zip(found, wanted, strict=True):
                    assert one.dtype == whole.dtype == dtype
                    one = np.asarray(tf.cast(one, "complex128"))
                    np.testing.assert_array_equal(one, other)

    for _ in range(2):
        check(*step(wholes))
    check(*step.python_function(wholes))
    (concrete,) = step._list_all_concrete_functions()
    types = {op.type for op in concrete.graph.get_operations()}
    used = {type_ for type_ in types if type_.startswith("Collective")}
    wanted = {"CollectiveAllToAllV2", "CollectiveGatherV2"}
    assert used == (wanted if name == "collective" else set())


def test_an_exchange_over_nccl_is_one_operation_on_each_gpu(monkeypatch):
    monkeypatch.setattr(collective_ops, "nccl_available", lambda _: (True, ""))
    rows = [Rows(1, [2, 3, 2]), Rows(0, [1, 1, 1])]
    row = [tf.ones([4, 7]), tf.ones([3, 2])]

    def step(wholes, devices):
        made = CollectiveOps()
        sums = made.all_reduce(wholes, devices)
        own = made.reduce_scatter(wholes, devices, rows)
        return sums, made.all_gather(own, devices, rows)

    found = {}
    for op in ops_of(step, [row] * 3, GPUS):
        if op.type.startswith("Collective"):
            assert op.get_attr("communication_hint") == b"nccl"
            found.setdefault(op.type, []).append(op)
    kinds = ("ReduceV2", "ReduceScatterV2", "GatherV2")
    assert set(found) == {f"Collective{kind}" for kind in kinds}
    for ops in found.values():
        of_one, of_other = ops[:3], ops[3:]
        assert places(of_one) == places(of_other) == [0, 1, 2]


@pytest.mark.core
@pytest.mark.parametrize("name", ON_CPUS)
def test_one_tower_no_gradients_and_unlike_ones(name):
    (grads,) = make_gradients(1)
    (results,) = ON_CPUS[name]().all_reduce([grads], cpus(1))
    for index, (result, grad) in enumerate(zip(results, grads, strict=True)):
        assert result is grad, index
    reduce = ON_CPUS[name]().all_reduce
    assert reduce([[], []], cpus(2)) == [[], []]
    with pytest.raises(TowerError, match="Gradient 1 .* tower 1"):
        reduce([[ONES, ONES], [ONES, tf.ones([1])]], cpus(2))


@pytest.mark.core
@pytest.mark.parametrize("name", ON_CPUS)
def test_shapes_known_only_at_run_time_and_before(name):
    reduce = ON_CPUS[name]().all_reduce
    row = [tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([4, 3])]

    @tf.function(input_signature=[[row, row]])
    def step(grads):
        results = reduce(grads, cpus(2))
        assert results[1][1].shape == [4, 3]
        return results

    result = step([[tf.ones([5, 2]), tf.ones([4, 3])]] * 2)[1]
    assert [tensor.numpy().tolist() for tensor in result] == [
        [[2.0] * 2] * 5,
        [[2.0] * 3] * 4,
    ]


def slices(width, dtype=tf.float32):
    rows = tf.zeros([2], tf.int64)
    return tf.IndexedSlices(tf.ones([2, width], dtype), rows)


ONES = tf.ones([2])
FIRST = [ONES, slices(3)]
UNLIKE = [
    ([ONES], "1 is None on tower 1, but a tf.IndexedSlices .* on tower 0"),
    ([ONES, ONES], "1 is a tf.Tensor .* on tower 1, but a tf.IndexedSlices"),
    ([ONES, slices(4)], r"1 is .* \(None, 4\) on .* but .* \(None, 3\)"),
    (
        [tf.ones([3]), slices(3)],
        r"Gradient 0 is .* \(3,\) on tower 1, but .* \(2,\) on tower 0",
    ),
    ([ONES, slices(3, tf.float64)], "1 is .* float64 .* but .* float32"),
    ([ONES, None], "Gradient 1 is None on tower 1"),
]


@pytest.mark.core
@pytest.mark.parametrize(
    ("grads", "message"),
    [
        *(([FIRST, other], message) for other, message in UNLIKE),
        ([FIRST], "of 1 towers for 2 devices"),
        ([], "at least one"),
    ],
)
def test_what_differs_is_named(grads, message):
    with pytest.raises(TowerError, match=message):
        OnTowers().all_reduce(grads, cpus(2))


# ---- where they sum, and who waits for whom ----------------------------------


GPUS = [f"/device:GPU:{k}" for k in range(3)]


def places(ops):
    return [tf.DeviceSpec.from_string(op.device).device_index for op in ops]


def sums_of(ops, size):
    """The ops of a graph that add vectors of that size."""
    adds = [op for op in ops if op.type == "AddN"]
    return [op for op in adds if op.outputs[0].shape == [size]]


@pytest.mark.core
@pytest.mark.parametrize(
    ("reduce", "expected"),
    [(OnDevice(), [0, 0, 0, 0]), (OnTowers(), [0, 1, 2, 0])],
)
def test_where_gradients_are_added(reduce, expected):
    row = [tf.ones([i + 1]) for i in range(4)]
    ops = ops_of(reduce.all_reduce, [row] * 3, cpus(3))
    assert [places(sums_of(ops, i + 1)) for i in range(4)] == [
        [place] for place in expected
    ]


def test_sums_at_the_place_of_a_weight():
    row = [tf.ones([1]), tf.ones([2])]
    ops = ops_of(OnDevice(cpus(3)[1]).all_reduce, [row] * 3, cpus(3))
    assert [places(sums_of(ops, size)) for size in (1, 2)] == [[1], [1]]


def test_main_devices_rotate_and_groups_do_not_mix():
    row = [tf.ones([i + 1]) for i in range(6)]
    ops = ops_of(Hierarchical().all_reduce, [row] * 8, cpus(8))
    for index in range(6):
        adds = sums_of(ops, index + 1)
        inside = [op for op in adds if len(op.inputs) == 4]
        across = [op for op in adds if len(op.inputs) == 2]
        assert places(inside) == places(across) == [index % 4, 4 + index % 4]
        sources = [{tensor.op for tensor in op.inputs} for op in across]
        # In whichever order: the groups have the same bits.
        assert sources == [set(inside)] * 2


# What each operation is given for a dtype; None: its gradients are added.
SENT_AS = {
    "bfloat16": ("bfloat16", "float32"),
    "complex64": ("float32", "float32"),
    "complex128": ("float64", "float64"),
    "float16": ("float16", "float16"),
    "float64": ("float64", "float64"),
    "int32": ("int32", None),
    "uint8": ("int32", None),
    "uint32": ("int64", "int64"),
}


@pytest.mark.parametrize(("devices", "column"), [(cpus(3), 0), (GPUS, 1)])
def test_what_operations_do_not_know_is_sent_wider_or_added(devices, column):
    def sent_and_added(row):
        ops = ops_of(CollectiveOps().all_reduce, [row] * 3, devices)
        kind = "CollectiveReduceV2"
        sent = {op.inputs[0].dtype.name for op in ops if op.type == kind}
        return sent, sum(op.type == "AddN" for op in ops)

    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))
    unknown = tf.TensorSpec([None], tf.float32)
    row = [slices, tf.ones([0, 2]), unknown]
    assert sent_and_added(row) == (set(), 2)
    for dtype, names in SENT_AS.items():
        name = names[column]
        wanted = ({name}, 0) if name else (set(), 1)
        assert sent_and_added([tf.ones([2], dtype)]) == wanted, dtype


@pytest.mark.parametrize(
    ("devices", "parts", "reason"),
    [
        (cpus(2), [1, 1], "/device:CPU:0 is not a GPU"),
        (GPUS[:1], [1], "at least two"),
        (GPUS[:2], [1], "/device:GPU:1 does not exist"),
        (GPUS, [1, 2], "GPU:1 and /device:GPU:2 are on the same"),
        (GPUS, [1, 1, 1], None),
    ],
)
def test_nccl_needs_different_physical_gpus(
    monkeypatch, devices, parts, reason
):
    gpus = [types.SimpleNamespace(name=f"p{i}") for i in range(len(parts))]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda gpu: [None] * parts[gpus.index(gpu)],
    )
    available, why = nccl_available(devices)
    assert available == (reason is None)
    assert (reason or "3 different physical GPUs") in why


# ---- TensorFlow's collective ops: their keys, and what may disturb them ------


def rows(towers, number=3, size=100):
    return [
        [tf.fill([size + i], float(k + i)) for i in range(number)]
        for k in range(towers)
    ]


def on_cpus(towers):
    return compiled(CollectiveOps().all_reduce, cpus(towers))


def test_groups_and_graphs_in_turn_also_of_a_stock_strategy():
    stock = tf.distribute.MirroredStrategy(cpus(2))
    steps = {towers: on_cpus(towers) for towers in (4, 2)}
    with stock.scope():
        steps[3] = on_cpus(3)

    @tf.function
    def of_stock():
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", tf.ones([2]))

        return stock.run(replica)

    for _ in range(2):
        # The last one is another graph of one group.
        for given in ((4, 9, 100), (2, 1, 5), (3, 3, 9), (2, 4, 3)):
            grads = rows(*given)
            assert_sums(steps[len(grads)](grads), grads)
            assert of_stock().values[0].numpy().tolist() == [2, 2]


def test_inside_a_loop_and_a_condition():
    reduce = CollectiveOps().all_reduce

    @tf.function
    def step(grads, times):
        for turn in tf.range(times):
            if turn % 2 == 0:
                grads = reduce(grads, cpus(2))
        return grads[1][0][0]

    grads = [[tf.ones([4])], [tf.ones([4])]]
    assert step(grads, tf.constant(40)).numpy() == 2.0**20


def test_two_threads_run_one_graph():
    step = on_cpus(4)
    grads = rows(4, number=8)
    step(grads)

    def work(_):
        for _ in range(20):
            assert_sums(step(grads), grads)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert len([*pool.map(work, range(2), timeout=60)]) == 2


def test_steps_after_one_that_failed():
    reduce = CollectiveOps().all_reduce

    @tf.function
    def step(grads, fail):
        grads = [list(row) for row in grads]
        with tf.device("/device:CPU:1"):
            check = tf.debugging.Assert(tf.logical_not(fail), ["tower 1"])
            with tf.control_dependencies([check]):
                grads[1][1] = tf.identity(grads[1][1])
        return reduce(grads, cpus(4))

    # TensorFlow may give up all collectives of a process for good where the
    # first step, in which the towers find one another, is the one that fails.
    step(rows(4), tf.constant(False))
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(rows(4), tf.constant(True))
        for _ in range(20):
            results = step(rows(4), tf.constant(False))
        assert_sums(results, rows(4))


def test_several_groups_of_devices_and_one_device_twice():
    reduce = CollectiveOps().all_reduce

    @tf.function
    def step(devices):
        return [reduce(rows(len(names)), names) for names in devices]

    full = [f"/job:localhost/replica:0/task:0{name}" for name in cpus(2)]
    again = [cpus(1)[0]] * 2
    for found in step([cpus(3), full, cpus(2), again]):
        assert_sums(found, rows(len(found)))
