"""Checks of a worker: slots, or weights, in shards on ranks of one tower."""

import contextlib
import functools
import gc
import itertools
import os
import pathlib
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.weights import shards
from keras_towers.fit.weights.joint_access import access_of
from keras_towers.fit.weights.shards import spans_ranks
from keras_towers.fit.weights.without_memory import DeferredVariable
from keras_towers.foundation import settings
from keras_towers.partition.timeline.sliced_weights import sliced_uses
from tests.kit.compare import assert_all_close
from tests.kit.memory import without_room
from tests.kit.ranks import check
from tests.kit.training import OwnSlots
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1])
# The models are small.
shards.SMALLEST_BYTES = 1


def sharded(**options):
    return s.Strategy(**{"towers": 1, "updates": "sharded", **options})


def adam():
    return keras.optimizers.Adam(0.02)


def compiled(make=adam, **options):
    return s.model(optimizer=make(), metrics=[], **options)


def train(mine, **options):
    s.fit(mine, **{"epochs": 2, "batch_size": 16, **options})


def alone(*fits):
    """The model of one process, which rank 0 trains."""
    made = compiled(run_eagerly=True)
    if s.RANK == 0:
        for options in fits or ({},):
            train(made, **options)
    return made


def values(mine):
    return [v.numpy() for v in (*mine.variables, *mine.optimizer.variables)]


def assert_same_state(one, other):
    """Weights and slots are the same on all ranks, on rank 0 the other's."""
    found = values(one)
    first, *others = s.gather([v.tobytes() for v in found])
    for rank, of_rank in enumerate(others, 1):
        assert of_rank == first, f"rank {rank} has other values than rank 0"
    if s.RANK == 0:
        assert_all_close(found, values(other), 1e-5)


@check
def state_is_in_shards_and_reads_as_a_whole():
    """At every event, on all ranks, and for a callback of rank 0 alone."""
    events = ("on_epoch_begin", "on_train_batch_end", "on_epoch_end")
    held = []

    def look(mine):
        held.append(0)
        for slot in mine.optimizer._momentums:
            for (shard,) in slot._value.shards:
                held[-1] += shard.numpy().nbytes

    def looked_at(mine, *callbacks):
        found, alone = [], []
        look = {e: lambda mine: found.append(values(mine)) for e in events}
        of_rank_0 = {e: lambda it: alone.append(values(it)) for e in events}
        callbacks = [s.Does(**look), kt.ChiefOnly(s.Does(**of_rank_0))]
        callbacks += given
        train(mine, callbacks=callbacks, validation_data=(s.X, s.Y))
        for one, other in zip(found, alone, strict=s.RANK == 0):
            assert_all_close(one, other, 0)
        return found

    path = str(FOLDER / "in-shares-{epoch}.keras")
    within = str(FOLDER / "in-shares-{epoch}-{batch}.weights.h5")
    given = [
        keras.callbacks.ModelCheckpoint(path),
        keras.callbacks.ModelCheckpoint(
            within, save_freq=2, save_weights_only=True
        ),
        s.Does(on_train_batch_end=look, on_epoch_end=look),
    ]
    mine, reference = compiled(), compiled(run_eagerly=True)
    for each in (mine, reference):
        each.optimizer.build(each.trainable_variables)
    with sharded() as strategy:
        found = looked_at(mine)
        description = str(strategy.describe())
    weights = sum(w.nbytes for w in mine.get_weights())
    assert len(set(held)) == 1
    assert sum(s.gather(held[-1])) == weights
    assert 0 < held[-1] < 0.75 * weights
    scalars = [v for v in mine.optimizer.variables if len(v.shape) == 0]
    state = 2 * held[-1] + sum(v.numpy().nbytes for v in scalars)
    assert f"optimizer state: {state:,} bytes" in description
    for slot in mine.optimizer.variables:
        slot.numpy()
        assert isinstance(slot._value, tf.Variable), slot.path
    given = []
    if s.RANK == 0:
        for one, other in zip(found, looked_at(reference), strict=True):
            assert_all_close(one, other, 1e-5)
    assert_same_state(keras.models.load_model(path.format(epoch=2)), reference)
    mine.load_weights(within.format(epoch=1, batch=2))
    # After two of the batches, hence at the third look.
    assert_all_close(mine.get_weights(), found[2][: len(mine.weights)], 1e-6)


@check
def what_only_some_ranks_write_reaches_all():
    def rank_0_writes(mine):
        if s.RANK == 0:
            slot = mine.optimizer._momentums[0]
            slot.assign(np.full(slot.shape, 0.5))

    def all_write(mine):
        slot = mine.optimizer._momentums[-1]
        slot.assign(np.full(slot.shape, 0.25))

    mine, reference = compiled(), compiled(run_eagerly=True)
    within = s.Does(on_train_batch_end=rank_0_writes, on_epoch_end=all_write)
    with sharded():
        train(mine, callbacks=[within])
    train(reference, callbacks=[within])
    assert_same_state(mine, reference)


@check
def slots_of_every_origin_are_those_of_one_device():
    """Steps divide some at once, others before the next call."""
    own = functools.partial(OwnSlots, 0.02)
    mine, reference = compiled(own), compiled(own, run_eagerly=True)
    with sharded(updates=None, weights="sharded"):
        for _ in range(3):
            train(mine)
        assert all(map(spans_ranks, (*mine.optimizer.m, *mine.optimizer.slow)))
    for _ in range(3 if s.RANK == 0 else 0):
        train(reference)
    assert_same_state(mine, reference)


@check
def ranks_may_have_loaded_a_model_or_made_it():
    """Keras does not name the optimizer around another one that it loads."""
    path = str(FOLDER / f"loaded-{s.RANK}.keras")

    def make(**options):
        keras.utils.set_random_seed(0)
        given = keras.Input((4,))
        hidden = keras.layers.Dense(8, "relu", name="hidden")(given)
        made = keras.Model(given, keras.layers.Dense(3, name="out")(hidden))
        inner = keras.optimizers.SGD(0.1, 0.9)
        scaled = keras.optimizers.LossScaleOptimizer(inner)
        made.compile(scaled, "mse", **options)
        return made

    reference = make(run_eagerly=True)
    train(reference)
    reference.save(path)
    with sharded(updates=None, weights="sharded"):
        mine = make() if s.RANK else keras.models.load_model(path)
        mine.run_eagerly = False
        assert s.RANK or mine.optimizer.variables[-1].path.startswith("sgd/")
        train(mine)
    train(reference)
    assert_same_state(mine, reference)


@check
def what_is_held_from_before_a_block_has_its_value():
    mine, reference = compiled(), alone({"epochs": 3})
    kernel = mine.weights[0]
    value = kernel.value
    read = tf.function(lambda: tf.reduce_sum(value * value))
    write = tf.function(lambda: value.assign(value + 1).dtype.size)
    read, write = read.get_concrete_function(), write.get_concrete_function()

    def look(_=None):
        found = kernel.numpy()
        assert value.numpy().tolist() == found.tolist()
        assert_all_close([read()], [np.sum(found * found)], 1e-5)

    def change(_=None):
        before = kernel.numpy()
        write()
        assert_all_close([value], [before + 1], 1e-6)
        value.assign(value - 1)
        value.assign(kernel)
        kernel.value.assign(value)
        assert_all_close([kernel], [before], 1e-6)

    does = s.Does(on_train_batch_end=look, on_epoch_end=change)
    with sharded(updates=None, weights="sharded"):
        train(mine, epochs=2, callbacks=[does])
        with s.refused("cannot be used in a tf.function of your own"):
            tf.function(lambda: read())()
        train(mine, epochs=1)
        if s.RANK == 0:
            look()
    # On all ranks: it becomes ordinary.
    read()
    assert kernel.value is value
    look()
    change()
    assert_same_state(mine, reference)


@check
def a_read_that_others_do_not_take_part_in_is_refused():
    mine = compiled()
    with contextlib.suppress(SystemExit), sharded():
        train(mine, epochs=1)
        first, second, *_ = mine.optimizer._momentums
        with s.refused("the ranks do different things", "reads variable"):
            (first if s.RANK == 0 else second).numpy()

        def read_beside(_):
            threads.append(threading.Thread(target=read))
            threads[-1].start()
            threads[-1].join()

        def read():
            with s.refused("a call runs in another thread, and rank"):
                first.numpy()
            refused.append(True)

        threads, refused = [], []
        beside = kt.ChiefOnly(s.Does(on_epoch_end=read_beside))
        train(mine, epochs=1, callbacks=[beside])
        assert len(refused) == (s.RANK == 0)
        mine.train_on_batch(s.X[:8], s.Y[:8])
        if s.RANK == 0:
            # The others are at the beginning of their next call, and serve it.
            first.numpy()
        mine.train_on_batch(s.X[:8], s.Y[:8])
        with pytest.MonkeyPatch.context() as patch:
            # They connect again when they read, not before.
            patch.setattr(settings, "FAILED_CALL_S", 0)
            if s.RANK == 0:
                with s.refused("a call has failed on rank 1", "reads variable"):
                    first.numpy()
            else:
                with pytest.raises(TypeError):
                    mine.train_on_batch(s.X[:8], s.Y[:8], unknown=3)
        values(mine)
        # The others are at the end of the block, and serve it.
        kernel = first.numpy() if s.RANK == 0 else None
        sys.exit()
    if s.RANK == 0:
        assert kernel is not None
    again = [first.numpy().tobytes()]
    assert len({*s.gather(*again)}) == 1


@check
def variables_of_several_blocks_are_told_apart():
    """Also where one rank reads, which others serve by those of another."""
    first, second = compiled(), compiled()
    wanted = [alone({"epochs": 1}), alone({"epochs": 2})]
    with sharded():
        train(first, epochs=1)
    with sharded():
        train(second)
        found = values(first) if s.RANK == 0 else None
    # Ordinary on all ranks: none waits for another to read it once more.
    assert_same_state(first, wanted[0])
    assert_same_state(second, wanted[1])
    if s.RANK == 0:
        assert_all_close(found, values(wanted[0]), 1e-5)


@check
def what_other_ranks_have_dropped_can_be_read():
    mine, reference = compiled(), alone({"epochs": 1})
    with sharded():
        train(mine, epochs=1)
    if s.RANK > 0:
        del mine
    keras.backend.clear_session()
    gc.collect()
    with sharded():
        if s.RANK == 0:
            found = mine.optimizer._momentums[0].numpy()
            wanted = reference.optimizer._momentums[0].numpy()
            assert_all_close([found], [wanted], 1e-5)


@check
def what_a_block_has_left_in_parts_is_read_in_one_that_divides_nothing():
    """Before a call, in a callback and at the end: there the others serve."""
    first, second, reference = compiled(), compiled(), alone({"epochs": 1})
    path, found = str(FOLDER / "in parts.keras"), []
    with sharded():
        train(first, epochs=1)

    def read(_=None):
        if s.RANK == 0:
            found.append(first.optimizer._momentums[len(found)].numpy())

    with sharded(updates=None):
        read()
        train(second, epochs=1, callbacks=[s.Does(on_epoch_end=read)])
        if s.RANK == 0:
            first.save(path)
        read()
    if s.RANK == 0:
        wanted = reference.optimizer._momentums
        assert_all_close(found, [v.numpy() for v in wanted[:3]], 1e-5)
        saved = keras.saving.load_model(path)
        assert_all_close(values(saved), values(reference), 1e-5)


@check
def a_model_in_shards_is_compiled_again_and_exported():
    def act(it):
        train(it, epochs=1)
        it.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        train(it, epochs=1, callbacks=[s.Does(on_epoch_end=export)])

    def export(it):
        if s.RANK == 0:
            it.export(path, verbose=False)
            found.append(it.evaluate(s.X, s.Y, verbose=0))

    found, path = [], str(FOLDER / "exported")
    mine, reference = compiled(), compiled(run_eagerly=True)
    with sharded(updates=None, weights="sharded") as strategy:
        act(mine)
        own = [w._value.shards for w in mine.trainable_variables]
        held = sum(part.numpy().nbytes for of_one in own for (part,) in of_one)
        assert f"weights: {held:,} bytes" in strategy.describe()
    assert held < 0.75 * sum(w.nbytes for w in mine.get_weights())
    after = f"{path}-after"
    mine.export(after, verbose=False)
    # It is still in parts.
    assert access_of(mine) is not None
    predicted = mine(s.X)
    if s.RANK == 0:
        for each in (path, after):
            saved = tf.saved_model.load(each)
            assert_all_close([saved.serve(s.X)], [predicted], 1e-5)
        act(reference)
        assert_all_close(found[:1], found[1:], 1e-5)
    assert_same_state(mine, reference)


class Remembers(keras.Model):
    """Writes a weight in ``evaluate``, too."""

    def build(self, shape):
        self.bank = self.add_weight(shape=(8, 6), trainable=False)
        self.dense = keras.layers.Dense(3)
        self.dense.build(shape)

    def call(self, x):
        self.bank.assign_add(self.bank * 0.5)
        return self.dense(x)


@check
def writes_of_evaluate_are_refused():
    mine = Remembers()
    mine.build((None, s.X.shape[1]))
    mine.compile("sgd", "mse")
    strategy = sharded(updates=None, weights="sharded")
    with s.refused("evaluate of model", "only training steps"), strategy:
        mine.evaluate(s.X, s.Y, verbose=0)


@check
def what_cannot_be_shared_is_refused():
    mine = compiled()
    strategy = sharded()
    with s.refused("fit() and train_on_batch()", "leave updates out"), strategy:
        # From here on slots are where they are needed.
        mine.train_on_batch(s.X[:8], s.Y[:8])
        s.own_step(strategy, mine)((s.X[:8], s.Y[:8]))


@contextlib.contextmanager
def memory_of_rank_1(text):
    """A limit that one rank alone is given."""
    if s.RANK == 1:
        os.environ[settings.ENV_DEVICE_MEMORY] = text
    try:
        yield
    finally:
        os.environ.pop(settings.ENV_DEVICE_MEMORY, None)


@check
def what_does_not_fit_on_one_rank_is_refused_on_all():
    """Before its variables are placed, and before its step runs."""
    mine = compiled()
    before = mine.get_weights()
    for weights, text in (("whole", "600B"), ("sharded", "500B")):
        updates = "once" if weights == "whole" else None
        strategy = s.Strategy(towers=1, weights=weights, updates=updates)
        refuses = pytest.raises(kt.TowerError)
        with memory_of_rank_1(text), refuses as caught, strategy:
            train(mine)
        said = str(caught.value)
        assert f"/device:CPU:0 of rank 1 has {text[:3]} bytes" in said
        assert ("while a step runs" in said) == (weights == "sharded")
        assert_all_close(mine.get_weights(), before)
    with s.Strategy(towers=1):
        train(mine)
    assert_same_state(mine, alone())


@check
def what_does_not_fit_is_divided_on_all_ranks():
    """Where it is placed, and in its first step; made outside and inside."""
    reference = alone()
    ways = itertools.product((False, True), (False, True))
    for begins_whole, is_inside in ways:
        strategy = without_room(s.Strategy(towers=1), begins_whole)
        mine = compiled()
        with strategy:
            if is_inside:
                mine = compiled()
            mine.evaluate(s.X, s.Y, batch_size=16, verbose=0)
            train(mine)
            assert spans_ranks(mine.weights[0]), strategy.describe()
            assert any(map(spans_ranks, mine.optimizer.variables))
        assert_same_state(mine, reference)
        train(mine)
        assert_same_state(mine, alone({}, {}))
    # A limit that one rank alone has.
    mine = compiled()
    with memory_of_rank_1("1500B"), s.Strategy(towers=1) as strategy:
        train(mine)
        assert any(map(spans_ranks, mine.optimizer.variables))
    assert_same_state(mine, reference)


@check
def a_model_made_in_the_block_is_whole_on_no_rank():
    """Where initial values differ, and where a layer's are written."""

    def make():
        made = compiled(seed=s.RANK)
        last = made.layers[-1]
        last.set_weights([weight + 1 for weight in last.get_weights()])
        return made

    def find_deferred(made):
        return [
            isinstance(w._value, DeferredVariable)
            and w._value.first_value is not None
            for w in made.weights
        ]

    reference, seen = make(), []
    with sharded(weights="sharded", updates=None):
        mine = make()
        assert find_deferred(mine) == [True, True, False, False]
        look = s.Does(
            on_epoch_begin=lambda it: seen.extend(
                map(shards.spans_ranks, it.weights)
            )
        )
        train(mine, callbacks=[kt.EveryRank(look)])
        for weight in mine.weights:
            assert shards.spans_ranks(weight), weight.path
    # Also before the first step.
    assert seen == [True] * 8
    train(reference)
    assert_same_state(mine, reference)


@check
def large_weights_and_tables_are_used_in_slices():
    """A table and a head, which are the largest weights of a model."""
    tokens = np.random.default_rng(0).integers(0, 64, (22, 5)).astype("int32")

    def trained(**options):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((5,), dtype="int32")]
        layers += [keras.layers.Embedding(64, 8), keras.layers.Dense(64)]
        made = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        slow = keras.optimizers.AdamW(0.02, epsilon=0.1)
        made.compile(slow, loss, **options)
        made.fit(tokens, tokens, 8, 2, 0, shuffle=False)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_uses, "_LEAST_BYTES", 1)
        with sharded(weights="sharded", updates=None, gather_bytes=600) as way:
            mine = trained()
        described = way.describe()
    # Of the 2048 bytes of the head, and the next ones.
    assert "at most 768 bytes of gathered weights" in described, described
    assert_same_state(mine, trained(run_eagerly=True))
