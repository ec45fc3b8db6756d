"""Parts that others write: how they are checked, and what is refused."""

import functools
import unittest.mock
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.extending import (
    CASES,
    ComposedStrategy,
    EngineTransport,
    HookState,
    OnDevice,
    StatefulHook,
    check_strategy,
    join_job,
)
from keras_towers.inspection.conformance import strategy_check
from keras_towers.inspection.conformance.cases import CASES as CASES_BY_NAME
from keras_towers.inspection.conformance.outcomes import Outcome
from keras_towers.partition import partition_graph
from keras_towers.partition.ir.registry import OPERATIONS
from tests.kit.training import fit, linear
from tests.partition.kit import check_on_towers, sharded, trace


def test_all_that_is_listed_is_public():
    listed = kt.extending.__doc__.split("``")[1::2]
    assert "EngineTransport" in listed
    assert all(hasattr(kt.extending, name) for name in listed)


@pytest.mark.core
def test_a_strategy_that_differs_from_one_device_is_told_so():
    make = functools.partial(kt.TowerStrategy, 2, average=False)
    with pytest.raises(AssertionError, match="TowerStrategy.*case 'uneven'"):
        check_strategy(make, ["uneven"])
    assert "uneven" in CASES
    check_strategy(make, ["uneven"], tolerance=9.0)


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "cases", "said"),
    [
        (kt.TowerStrategy, ["unevn"], "no case 'unevn'. Did you mean 'uneven'"),
        (lambda: 3, ["uneven"], "got 3: give a function that makes a strat"),
        ("tower", ["uneven"], "got 'tower': give a function"),
    ],
)
def test_what_is_no_strategy_and_no_case_is_refused(make, cases, said):
    with pytest.raises(kt.TowerError, match=said):
        check_strategy(make, cases)


@pytest.mark.core
@pytest.mark.parametrize("options", [{}, {"weights": "sharded"}])
def test_a_reduction_gets_gradients_only(options, small_shards):
    found = []

    def reduce(grads, devices):
        found.extend((g.dtype, tuple(g.shape)) for g in grads[0])
        return OnDevice().all_reduce(grads, devices)

    # Rows of its batch are smaller than its gradient.
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(300)])
    model.compile("sgd", "mse", metrics=["mae"])
    with kt.TowerStrategy(2, mode=reduce, **options):
        model.fit(np.ones((8, 300)), np.ones((8, 300)), verbose=0)
    weights = {(tf.float32, tuple(w.shape)) for w in model.trainable_weights}
    assert {*found} == weights


def test_ranks_whose_weights_differ_are_named(monkeypatch):
    """In a job of two, of which the other has trained something else."""
    outcome = Outcome(linear(), {}, [("kernel", np.ones(2))])
    monkeypatch.setattr(strategy_check, "use_model", lambda *arguments: outcome)
    ranks = SimpleNamespace(
        rank=0,
        size=2,
        gather_objects=lambda value: [value, (*value[:2], ["other"])],
    )
    strategy = SimpleNamespace(_config=SimpleNamespace(job=ranks))
    with pytest.raises(AssertionError, match="rank 1 differs from rank 0"):
        strategy_check.compare(CASES_BY_NAME["uneven"], strategy)


@pytest.mark.core
def test_towers_divide_an_operation_whose_axes_are_given():
    rows = sharded(-1, 4)
    graph = trace(tf.math.special.dawsn, rows)

    def computed_once():
        program = partition_graph(graph, [rows.layout], graph.outputs)
        return [operation.type for operation in program.computed_once]

    assert computed_once() == ["Dawsn"]
    with unittest.mock.patch.dict(OPERATIONS):
        kt.extending.add_operation("Dawsn", kt.extending.elementwise())
        assert not computed_once()
        check_on_towers(tf.math.special.dawsn, rows)
    with pytest.raises(kt.TowerError, match="'Dawns', but .* no operation"):
        kt.extending.add_operation("Dawns", kt.extending.elementwise())


class Alone(EngineTransport):
    """A transport of one process, in a job that it takes for one of two."""

    name = "mine"

    def __init__(self, size=2):
        place = SimpleNamespace(rank=0, size=size, local_rank=0, local_size=1)
        super().__init__(place)

    def engine_sum(self, tensors, key):
        return [2 * tensor for tensor in tensors]

    def engine_gather(self, tensor, key):
        return tf.concat([tensor, tensor], 0)


def test_a_transport_has_its_sum_and_its_gather():
    transport = Alone()
    (total,) = transport.all_reduce([tf.constant([1, 2], tf.uint8)], "sum")
    assert total.dtype == tf.uint8 and total.numpy().tolist() == [2, 4]
    rows = tf.constant([[1.0], [2.0]])
    assert transport.all_gather(rows, "rows").shape == (4, 1)
    part = transport.reduce_scatter(rows, [1, 1], "part")
    assert part.numpy().tolist() == [[2.0]]
    names = transport.all_gather(tf.constant(["a", "bc"]), "names")
    assert names.numpy().tolist() == [b"a", b"bc"] * 2


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda t: t[:0], "engine_sum of Wrong returned .*list of 1 tensors"),
        (lambda t: None, "engine_sum of Wrong returned None"),
        (lambda t: [t[0][:1]], r"float32 and shape \(1,\): .*shape \(3,\)"),
        (lambda t: [tf.cast(t[0], "int32")], "tensor of int32"),
    ],
)
def test_wrong_sums_of_a_transport_name_it(returned, said):
    class Wrong(Alone):
        def engine_sum(self, tensors, key):
            return returned(tensors)

    with pytest.raises(kt.TowerError, match=said):
        Wrong().all_reduce([tf.ones(3)], "sum")


def test_wrong_rows_of_a_transport_name_it():
    class Wrong(Alone):
        def engine_gather(self, tensor, key):
            return tensor[0]

    with pytest.raises(kt.TowerError, match=r"of Wrong returned .*shape \(2,"):
        Wrong().all_gather(tf.ones([3, 2]), "rows")


def test_a_process_that_nobody_has_started_is_a_job():
    job = join_job("mine")
    assert (job.rank, job.size, job.local_rank, job.local_size) == (0, 1, 0, 1)
    for access in (lambda: job.put("key", 1), lambda: job.get("key", 1)):
        with pytest.raises(kt.TowerError, match="job of one process"):
            access()


class NoSum(StatefulHook):
    def init(self, specs):
        return HookState()


class NoGather(EngineTransport):
    name = "mine"

    def engine_sum(self, tensors, key):
        return tensors


class NoPlace(Alone):
    def __init__(self):
        EngineTransport.__init__(self)


class NoParts(ComposedStrategy):
    def __init__(self):
        self.parts = 3


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (NoSum, r"\.NoSum is not complete: it does not define sum\."),
        (NoGather, r"\.NoGather .* not define engine_gather\."),
        (NoPlace, "NoPlace has no rank: its constructor must call"),
        (NoParts, r"\.NoParts is not complete: its constructor must call s"),
        (int, "builtins.int is not complete: .*all_reduce.*EngineTransport"),
    ],
)
def test_incomplete_parts_are_refused(make, said):
    def use():
        if make is not NoParts:
            return ComposedStrategy(2, transport=make())
        return make()

    with pytest.raises(kt.TowerError, match=said):
        use()


def first_device(weight):
    return "/device:CPU:0"


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placement": "CPU:0"}, "placement='CPU:0' is not allowed: give a f"),
        *(
            (
                {"placement": first_device, name: value},
                f"placement contradicts {name}={value!r}",
            )
            for name, value in (
                ("weights", "sharded"),
                ("updates", "each"),
                ("mode", "host"),
                ("packer", True),
            )
        ),
        ({"mode": 3}, "mode=3 is not allowed: give .*a function"),
        ({"speed": 3}, "ComposedStrategy has no option 'speed'"),
    ],
)
def test_options_that_parts_contradict_are_refused(options, said):
    with pytest.raises(kt.TowerError, match=said):
        ComposedStrategy(2, **options)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (
            {"placement": lambda weight: "/device:TPU:0"},
            r"placement .*<lambda> puts .*kernel on '/device:TPU:0': .*CPU:0",
        ),
        (
            {"placement": lambda weight: None},
            "puts .*kernel on None: it must return one of",
        ),
        ({"mode": lambda grads, devices: None}, "<lambda> must return 2 l"),
        (
            {"mode": lambda grads, devices: [row[:1] for row in grads]},
            "reduction .*<lambda> returned 1 sums for . gradients",
        ),
        (
            {
                "mode": lambda grads, devices: [
                    [tf.ones(9) for _ in row] for row in grads
                ]
            },
            "returned a tf.Tensor of float32 .* as the sum of gradient 0",
        ),
    ],
)
def test_what_a_part_returns_is_checked(part, said):
    model = linear()
    before = model.get_weights()
    with pytest.raises(kt.TowerError, match=said), ComposedStrategy(2, **part):
        fit(model)
    for weight, old in zip(model.get_weights(), before, strict=True):
        assert (weight == old).all()
