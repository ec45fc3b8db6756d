"""``schedule``: when a program computes what, without running it."""

import collections
import functools

import pytest
import tensorflow as tf

from keras_towers.partition import gradient_buckets
from keras_towers.partition.effects import LOOPS
from keras_towers.partition.layouts import REPLICATED, InShards
from keras_towers.partition.memory_estimate import MemoryEstimate, events_of
from keras_towers.partition.program import Operation
from keras_towers.partition.schedule import RematLimits, schedule
from keras_towers.partition.tensor_sizes import TensorSizes
from tests.partition.kit import laid_out, replicated, sharded

ROWS, TOWERS, WIDTH, LAYERS = 2048, 2, 256, 12


def gradients(x, *weights, checked=False):
    """Return those of the weights of a deep network."""
    with tf.GradientTape() as tape:
        tape.watch(weights)
        for weight in weights:
            x = tf.nn.gelu(x @ weight)
        loss = tf.reduce_sum(x)
    found = tape.gradient(loss, weights)
    is_finite = tf.reduce_all(tf.math.is_finite(found[0]))
    checks = [tf.debugging.Assert(is_finite, ["?"])] if checked else []
    with tf.control_dependencies(checks):
        return tf.raw_ops.IdentityN(input=found, name="handed")


@functools.cache
def deep(xla=False, remat=None, parts=1, checked=False):
    """Return the scheduled program of a deep network and its gradients."""
    given = sharded(-1, WIDTH), *[replicated(WIDTH, WIDTH)] * LAYERS
    step = functools.partial(gradients, checked=checked)
    program = laid_out(step, *given, handed={"handed": [REPLICATED] * LAYERS})
    return schedule(
        program, TOWERS, ROWS, parts, remat=remat or RematLimits(), xla=xla
    )


def peak_bytes(program):
    return MemoryEstimate(
        program, TensorSizes(program, TOWERS, ROWS)
    ).peak_bytes()


def check_order(program):
    """Every tensor is computed before it is used, and nothing waits for it."""
    done = set()
    for event in events_of(program):
        if not isinstance(event, Operation):
            done.add(event.result)
            continue
        for tensor in event.inputs:
            source = tensor.operation
            is_there = source is None or source.is_repeated or tensor in done
            is_before = tensor.level <= event.level
            assert is_there and is_before, event.name
        missing = [o.name for o in event.after if o.outputs[0] not in done]
        assert not missing, event.name
        done.update(event.outputs)


def test_gradients_of_weights_are_computed_before_the_next_layer():
    program = deep()
    check_order(program)
    waits = [o for o in program.operations if o.after]
    waited_for = {other.name for o in waits for other in o.after}
    # Those of weights, which nothing else waits for; not the last one's.
    products = [
        o
        for o in program.operations
        if o.type == "MatMul" and o.outputs[0].shape == [WIDTH, WIDTH]
    ]
    assert len(products) == LAYERS
    missing = [o.name for o in products[:-1] if o.name not in waited_for]
    # As much as may be in flight.
    assert len(missing) <= 1


def test_what_takes_memory_is_computed_when_it_is_used():
    width, layers = 512, 8

    def step(x, *weights):
        products = [
            tf.matmul(x + index, x, transpose_a=True) for index in range(layers)
        ]
        pairs = zip(weights, products, strict=True)
        return [tf.norm(weight - 0.1 * product) for weight, product in pairs]

    given = [replicated(8, width), *[replicated(width, width)] * layers]
    program = laid_out(step, *given)
    one = width * width * 4
    weights = layers * one
    before = peak_bytes(program) - weights
    program = schedule(program, TOWERS, ROWS)
    check_order(program)
    assert before >= layers * one
    assert peak_bytes(program) - weights < 3 * one


def levels_of(step, *types):
    """Return the levels of operations in the scheduled program of a step."""
    program = schedule(laid_out(step, sharded(-1, WIDTH)), TOWERS, ROWS)
    check_order(program)
    found = {
        operation.type: operation.level for operation in program.operations
    }
    return [found[type_] for type_ in types]


def test_what_is_used_later_is_computed_later():
    def step(x):
        mean = tf.reduce_mean(tf.sin(x), 0)
        variance = tf.reduce_mean(tf.square(x - mean), 0)
        # It takes as much memory as what is kept for it, but for the mean.
        centered = tf.negative(tf.cos(x) - mean)
        return tf.reduce_sum(centered * tf.exp(x - variance))

    assert levels_of(step, "Sin", "Square", "Exp") == [0, 1, 2]
    assert levels_of(step, "Cos", "Neg") == [2, 2]


def test_what_is_received_is_not_kept_for_later():
    def step(x):
        product = tf.matmul(x, x, transpose_a=True)
        total = tf.reduce_sum(tf.sin(x), 0)
        later = tf.reduce_sum(tf.exp(x - total), 0)
        return later + tf.reduce_max(product, 0)

    assert levels_of(step, "MatMul", "Exp", "Max") == [0, 1, 1]


def test_what_may_be_computed_again_saves_memory():
    kept, again = deep(), deep(remat=RematLimits(0))
    check_order(again)
    before, after = kept.schedule, again.schedule
    # Programs are long: a failure is not to print them.
    assert [peak_bytes(kept), peak_bytes(again)] == [before.bytes, after.bytes]
    assert before.bytes - after.bytes == after.saved > 0.5 * before.bytes
    assert 0 < after.work < 0.5
    copies = [o for o in again.operations if o.suffix.endswith("_again")]
    assert len(copies) == after.recomputed


def test_as_little_is_computed_again_as_a_limit_needs():
    kept, least = deep().schedule, deep(remat=RematLimits(0)).schedule
    limit = (kept.bytes + least.bytes) // 2
    found = deep(remat=RematLimits(limit)).schedule
    assert found.bytes <= limit
    assert 0 < found.work < least.work
    # What fits as it is, is left as it is.
    assert deep(remat=RematLimits(kept.bytes)).schedule.recomputed == 0


def types_again(program):
    return {o.type for o in program.operations if o.suffix.endswith("_again")}


def test_what_takes_little_work_for_its_memory_is_computed_again_first():
    kept = deep().schedule
    some = deep(remat=RematLimits(0.7 * kept.bytes))
    assert some.schedule.bytes <= 0.7 * kept.bytes
    assert "Erfc" in types_again(some)
    assert "MatMul" not in types_again(some)
    assert "MatMul" in types_again(deep(remat=RematLimits(1)))


def test_a_part_of_the_work_bounds_what_is_computed_again():
    least = deep(remat=RematLimits(0)).schedule
    bounded = deep(remat=RematLimits(0, most_work=least.work / 2)).schedule
    assert 0 < bounded.work <= least.work / 2
    assert bounded.bytes > least.bytes


def test_weights_in_shards_are_gathered_before_copies_use_them():
    weights = [tf.Variable(tf.ones([WIDTH, WIDTH])) for _ in range(LAYERS)]
    program = laid_out(
        lambda x: gradients(x, *weights),
        sharded(-1, WIDTH),
        captured=InShards(0, WIDTH),
        gather_bytes=4 * WIDTH * WIDTH * 4,
    )
    again = schedule(program, TOWERS, ROWS, remat=RematLimits(0))
    check_order(again)
    assert again.schedule.recomputed > 0


# Of several micro-batches they are added up first. A step whose check fails
# updates nothing.
@pytest.mark.parametrize(
    ("options", "levels"), [({}, 4), ({"parts": 2}, 1), ({"checked": True}, 1)]
)
def test_gradients_are_exchanged_in_buckets(options, levels, monkeypatch):
    bucket = LAYERS // 4 * WIDTH * WIDTH * 4
    monkeypatch.setattr(gradient_buckets, "_BUCKET_BYTES", bucket)
    program = deep.__wrapped__(**options)
    check_order(program)
    found = collections.Counter(e.level for e in program.exchanges)
    assert found == dict.fromkeys(range(levels), LAYERS // levels)


def test_xla_computes_segments_again_in_functions_of_their_own():
    kept, again = deep(xla=True), deep(xla=True, remat=RematLimits(0))
    check_order(again)
    levels = kept.levels, again.levels
    assert levels[0] < levels[1]
    firsts = {o.name: o.level for o in again.operations if not o.suffix}
    for operation in again.operations:
        if operation.suffix.endswith("_again"):
            level = operation.level
            assert level > firsts[operation.name]
    waits = sum(len(o.after) for o in kept.operations)
    assert waits == 0
    # The first one waits until the backward pass has come to it.
    first, *_ = (o for o in again.operations if o.suffix.endswith("_again"))
    assert len(first.after) > 0


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
    program = schedule(program, TOWERS, 1024, remat=RematLimits(0))
    check_order(program)
    again = types_again(program)
    assert "MatMul" in again
    assert "RandomUniform" not in again


def test_few_rounds_of_a_loop_run_at_a_time():
    def step(x):
        def twice(k, h):
            _, h = tf.while_loop(
                lambda j, h: j < k,
                lambda j, h: (j + 1, tf.tanh(h)),
                [0, h],
                parallel_iterations=2,
            )
            return k + 1, h

        limit = tf.shape(x)[1]
        loop = tf.while_loop(
            lambda k, h: k < limit, twice, [0, x], parallel_iterations=32
        )
        return loop[1]

    program = schedule(laid_out(step, sharded(-1, 3)), TOWERS, ROWS)
    (loop,) = [o for o in program.operations if o.type in LOOPS]
    body = loop.functions["body"]
    (inside,) = [o for o in body.operations if o.type in LOOPS]
    rounds = [o.attributes["parallel_iterations"].i for o in (loop, inside)]
    assert rounds == [4, 2]
