"""Which operations run on slices, and of which axes."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.layouts import InShards
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.sliced_weights import sliced_uses
from keras_towers.partition.timeline.sliced_weights.sliced_uses import (
    ROWS,
    SlicePlan,
)
from tests.partition.kit import laid_out, sharded

ROWS_OF = InShards(0, 8, 4)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(sliced_uses, "_LEAST_BYTES", 1)


def planned(function, *given, captured=ROWS_OF, most=64):
    program = laid_out(function, *given, captured=captured)
    return SlicePlan(program, TensorSizes(program, 2, 8), most, xla=False)


def used(plan):
    """The types of operations that run on slices, and the axes of each."""
    return {
        operation.type: (use.inputs, use.outputs)
        for operation, use in plan.uses.items()
    }


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda x, w: x @ w, {"MatMul": ([1, 0], [None])}),
        (
            lambda x, w: tf.matmul(x, w, transpose_b=True),
            {"MatMul": ([None, 0], [1])},
        ),
        (
            lambda x, w: tf.einsum("ab,bc->ca", x, w),
            {"Einsum": ([1, 0], [None])},
        ),
        # A loop gets the whole.
        (
            lambda x, w: tf.while_loop(
                lambda k, _: k < 2, lambda k, y: (k + 1, y @ w), (0, x)
            )[1],
            {},
        ),
    ],
)
def test_products_run_on_slices_of_rows(function, wanted):
    weight = tf.Variable(tf.ones([8, 8]))
    plan = planned(lambda x: function(x, weight), sharded(-1, 8))
    assert used(plan) == wanted
    assert len(plan.gathers) == len(wanted)


def test_lookups_of_rows_run_on_slices_of_them():
    table = tf.Variable(tf.ones([8, 8]))

    def function(ids):
        return tf.gather(table, tf.concat([ids] * 8, 0))

    plan = planned(function, sharded(-1, dtype="int32"))
    ((operation, use),) = plan.uses.items()
    assert operation.type == "GatherV2"
    assert (use.label, use.outputs) == (ROWS, [None])


@pytest.mark.parametrize(
    ("layout", "most", "cut"),
    [
        (ROWS_OF, 64, (4, 2, 4)),
        # Of columns, each tower has all rows.
        (InShards(1, 8, 4), 64, (8, 1, 8)),
        (ROWS_OF, 512, None),
        # Towers differ in their numbers of rows.
        (InShards(0, 8), 64, None),
    ],
)
def test_how_large_weights_are_cut(layout, most, cut):
    weight = tf.Variable(tf.ones([8, 8]))
    plan = planned(
        lambda x: x @ weight, sharded(-1, 8), captured=layout, most=most
    )
    found = [(c.own, c.towers, c.number) for _, c in plan.gathers.values()]
    assert found == ([] if cut is None else [cut])
