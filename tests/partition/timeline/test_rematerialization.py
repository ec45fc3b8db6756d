"""``rematerialize``: what a program computes again, without running it."""

import pytest
import tensorflow as tf

from keras_towers.partition.ir.axes import BATCH
from keras_towers.partition.ir.builder import Builder
from keras_towers.partition.ir.layouts import InShards
from keras_towers.partition.ir.program import Tensor
from keras_towers.partition.ir.tensor_sizes import TensorSizes
from keras_towers.partition.timeline.kept_results import RematLimits
from keras_towers.partition.timeline.rematerialization import rematerialize
from keras_towers.partition.timeline.schedule import BatchSplit, schedule
from tests.partition.deep_network import (
    LAYERS,
    SPLIT,
    TOWERS,
    WIDTH,
    deep,
    gradients,
    peak_bytes,
)
from tests.partition.kit import by_hand, earliest, laid_out, replicated, sharded
from tests.partition.order import check_order

SIDE = 1024
TENSOR = SIDE * SIDE * 4


def chain(layers=6):
    """A program by hand: products and exponentials, and their gradients."""
    builder, shape = Builder(), tf.TensorShape([SIDE, SIDE])
    x = Tensor(tf.float32, shape, BATCH)

    def add(name, type_, *inputs):
        builder.name = name
        return builder.op(type_, inputs, shape)

    kept, last = [], x
    for k in range(layers):
        product = add(f"product {k}", "MatMul", last, x)
        last = add(f"exp {k}", "Exp", product)
        kept.insert(0, (product, last))
    for product, exp in kept:
        last = add("", "MatMul", add("", "Mul", last, exp), product)
    return by_hand(builder, x, results=[last])


EXPS = [f"exp {k}" for k in reversed(range(5))]
DEEPER = "product 0", "exp 0", "product 1", "exp 1", "product 2", "exp 2"
# Limits, in tensors; how many a tower then has at a time; what runs again.
PLANS = {
    "what fits": (RematLimits(13 * TENSOR), 13, []),
    "what takes little work": (RematLimits(9.5 * TENSOR), 9, EXPS[1:]),
    "what is worth its work": (RematLimits(0), 8, EXPS),
    "as much as possible": (
        RematLimits(1),
        7,
        ["exp 3", *DEEPER, *DEEPER[:4], *DEEPER[:2]],
    ),
    "a part of the work": (RematLimits(1, most_work=0.1), 8, EXPS),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_runs_again(name):
    limits, tensors, again = PLANS[name]
    program = chain()
    sizes, timeline = TensorSizes(program, 1, 1), earliest(program, 1, 1)
    timeline, _ = rematerialize(timeline, sizes, 1, limits, None)
    plan = timeline.plan
    names = [o.name for o in timeline.program.operations if o.suffix]
    assert names == again
    assert plan.bytes // TENSOR == tensors
    assert plan.recomputed == len(again)
    assert (plan.work > 0.1) == ("product 0" in again)


def copies_in(timeline):
    """Return the operations that run again, in order."""
    operations = timeline.program.operations
    return [o for o in operations if o.suffix.endswith("_again")]


def test_what_may_be_computed_again_saves_memory():
    kept, again = deep(), deep(remat=RematLimits(0))
    check_order(again)
    before, after = kept.plan, again.plan
    # Programs are long: a failure is not to print them.
    assert [peak_bytes(kept), peak_bytes(again)] == [before.bytes, after.bytes]
    assert before.bytes - after.bytes == after.saved > 0.5 * before.bytes
    assert 0 < after.work < 0.5
    assert len(copies_in(again)) == after.recomputed


def test_weights_in_shards_are_gathered_before_copies_use_them():
    weights = [tf.Variable(tf.ones([WIDTH, WIDTH])) for _ in range(LAYERS)]
    program = laid_out(
        lambda x: gradients(x, *weights),
        sharded(-1, WIDTH),
        captured=InShards(0, WIDTH),
    )
    budget = 4 * WIDTH * WIDTH * 4
    again = schedule(program, SPLIT, RematLimits(0), gather_bytes=budget)
    check_order(again)
    assert again.plan.recomputed > 0


def test_xla_computes_segments_again_in_functions_of_their_own():
    kept, again = deep(xla=True), deep(xla=True, remat=RematLimits(0))
    check_order(again)
    levels = kept.number_of_levels, again.number_of_levels
    assert levels[0] < levels[1]
    operations = again.program.operations
    firsts = {o.name: o for o in operations if not o.suffix}
    for operation in copies_in(again):
        level = again.levels[operation]
        assert level > again.levels[firsts[operation.name]]
    waits = sum(map(len, kept.waits.values()))
    assert waits == 0
    # The first one waits until the backward pass has come to it.
    first, *_ = copies_in(again)
    assert len(again.waits[first]) > 0


def test_nothing_that_acts_or_draws_runs_again():
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            for _ in range(6):
                x = tf.nn.gelu(x @ w) * tf.random.uniform([512])
                x = tf.debugging.check_numerics(x, "wrong")
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, w)

    program = laid_out(step, sharded(-1, 512), replicated(512, 512))
    timeline = schedule(program, BatchSplit(TOWERS, 1024), RematLimits(0))
    check_order(timeline)
    again = {operation.type for operation in copies_in(timeline)}
    assert "MatMul" in again
    assert "RandomUniform" not in again
