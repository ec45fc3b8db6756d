"""Checks of a worker: the update shared between ranks of one tower each."""

import contextlib
import functools
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.optimizers import OPTIMIZERS
from tests.kit.ranks import check
from tests.processes.small import (
    RANK,
    Messages,
    Strategy,
    X,
    Y,
    gather,
    model,
    refused,
)

FOLDER = pathlib.Path(sys.argv[1])


def sharded(**options):
    return Strategy(towers=1, updates="sharded", **options)


def adam(**options):
    return keras.optimizers.Adam(0.02, **options)


def compiled(optimizer=None):
    mine = model()
    mine.compile(optimizer or adam(), "mse")
    return mine


def values(mine):
    return [v.numpy() for v in (*mine.variables, *mine.optimizer.variables)]


def assert_same_state(one, other):
    """Weights and slots are those of the other, and the same on all ranks."""
    found = values(one)
    first, *others = gather([v.tobytes() for v in found])
    assert all(rank == first for rank in others)
    for mine, theirs in zip(found, values(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)


def fit(mine, **options):
    options = {"epochs": 2, "batch_size": 8, "shuffle": False, **options}
    return mine.fit(X, Y, verbose=0, **options)


class Does(keras.callbacks.Callback):
    """Does something at events; ``None`` is the model."""

    def __init__(self, **events):
        super().__init__()
        for event, does in events.items():
            setattr(self, event, lambda *a, does=does, **k: does(self.model))


class Broken(Exception):
    """What ends training in these checks."""


def breaks_behind(number):
    """A callback that ends training behind so many batches."""
    batches = []

    def count(model):
        batches.append(0)
        if len(batches) == number:
            raise Broken

    return Does(on_train_batch_end=count)


@check
def every_optimizer_in_shares_of_the_ranks():
    for name in OPTIMIZERS:
        options = {"clipnorm": 0.5} if OPTIMIZERS.index(name) % 2 else {}
        cls = functools.partial(
            getattr(keras.optimizers, name), 0.02, weight_decay=0.01, **options
        )
        mine, reference = compiled(cls()), compiled(cls())
        # Keras's fit builds ScheduleFreeAdamW without the weights.
        reference.optimizer.build(reference.trainable_variables)
        with sharded():
            fit(mine, epochs=1)
        fit(reference, epochs=1)
        try:
            assert_same_state(mine, reference)
        except AssertionError as error:
            raise AssertionError(name) from error


@check
def optimizers_of_optimizers_in_shares_of_the_ranks():
    averaging = {"use_ema": True, "ema_overwrite_frequency": 3}
    for make in (
        lambda: keras.optimizers.LossScaleOptimizer(adam(), 8.0),
        lambda: adam(**averaging),
        lambda: keras.optimizers.LossScaleOptimizer(adam(**averaging), 8.0),
        lambda: keras.optimizers.LossScaleOptimizer(
            adam(gradient_accumulation_steps=2), 8.0
        ),
    ):
        mine, reference = compiled(make()), compiled(make())
        with sharded():
            fit(mine)
        fit(reference)
        assert_same_state(mine, reference)


@check
def a_rank_holds_its_share_while_steps_run():
    mine = compiled()
    held, errors = [], []

    def look(mine):
        held.append(0)
        for slot in mine.optimizer._momentums:
            try:
                held[-1] += slot.numpy().nbytes
            except kt.TowerError as error:
                errors.append(str(error))

    with sharded() as strategy:
        fit(mine, callbacks=[Does(on_train_batch_end=look)])
        description = str(strategy.describe())
    weights = sum(w.nbytes for w in mine.get_weights())
    assert len(set(held)) == 1
    assert sum(gather(held[-1])) == weights
    assert 0 < held[-1] < 0.75 * weights
    assert "cannot be read between two steps" in errors[0]
    assert "has it" in errors[0]
    assert f"optimizer state: {2 * held[-1]:,} bytes" in description
    assert all(
        isinstance(s._value, tf.Variable) for s in mine.optimizer.variables
    )


@check
def state_is_whole_at_the_end_of_an_epoch():
    found = {}

    def look(event):
        return lambda mine: found.setdefault(event, []).append(values(mine))

    events = ("on_epoch_end", "on_train_end", "on_epoch_begin")
    mine, reference = compiled(), compiled()
    for each in (mine, reference):
        each.optimizer.build(each.trainable_variables)
    seen = {event: look(event) for event in events}
    options = {"validation_data": (X, Y), "epochs": 3}
    path = str(FOLDER / "in-shares-{epoch}.keras")
    with sharded():
        fit(
            mine,
            callbacks=[Does(**seen), keras.callbacks.ModelCheckpoint(path)],
            **options,
        )
    mine_found, found = found, {}
    fit(reference, callbacks=[Does(**{e: look(e) for e in events})], **options)
    for event in events:
        for one, other in zip(mine_found[event], found[event], strict=True):
            for a, b in zip(one, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    gather("written")
    saved = keras.models.load_model(path.format(epoch=3))
    assert_same_state(saved, reference)


@check
def training_goes_on_in_shares():
    mine, reference = compiled(), compiled()
    with sharded():
        fit(mine)
        mine.evaluate(X, Y, verbose=0)
        fit(mine)
        mine.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        fit(mine)
        other = compiled()
        fit(other)
    fit(reference)
    fit(reference)
    reference.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    fit(reference)
    assert_same_state(mine, reference)
    again = compiled()
    fit(again)
    assert_same_state(other, again)


@check
def batches_by_hand_in_shares():
    mine, reference = compiled(), compiled()
    path = FOLDER / f"by-hand-{RANK}.keras"
    with sharded():
        for _ in range(2):
            for first in range(0, 48, 8):
                here = slice(first, first + 8)
                mine.train_on_batch(X[here], Y[here])
            with refused("cannot be read between two steps", "evaluate()"):
                values(mine)
            mine.evaluate(X, Y, verbose=0)
        mine.save(path)
    for _ in range(2):
        for first in range(0, 48, 8):
            here = slice(first, first + 8)
            reference.train_on_batch(X[here], Y[here])
    assert_same_state(mine, reference)
    assert_same_state(keras.models.load_model(path), reference)


@check
def state_that_rank_0_has_loaded_in_shares():
    trained = compiled()
    fit(trained)
    path = FOLDER / "to-load.keras"
    if RANK == 0:
        trained.save(path)
    gather("written")
    with sharded():
        # It leaves slots where they were needed.
        compiled().train_on_batch(X[:8], Y[:8])
        mine = keras.models.load_model(path)
        if RANK > 0:
            for momentum in mine.optimizer._momentums:
                momentum.assign(tf.zeros_like(momentum))
        fit(mine)
    fit(trained)
    assert_same_state(mine, trained)


@check
def a_fit_within_an_epoch_of_another():
    def train(outer, inner):
        def also(mine):
            batches.append(0)
            if len(batches) in (3, 7):
                fit(inner, epochs=1)

        batches = []
        fit(outer, callbacks=[Does(on_train_batch_end=also)])

    models = [compiled() for _ in range(4)]
    with sharded():
        train(*models[:2])
    train(*models[2:])
    for one, other in zip(models[:2], models[2:], strict=True):
        assert_same_state(one, other)


@check
def state_is_whole_where_ranks_are_not_synchronised():
    mine, reference = compiled(), compiled()
    found = []
    with sharded(sync_every_epoch=False):
        look = Does(on_epoch_end=lambda mine: found.append(values(mine)))
        fit(mine, callbacks=[look])
    fit(reference, epochs=1)
    for one, other in zip(found[0], values(reference), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    fit(reference, epochs=1)
    assert_same_state(mine, reference)


@check
def state_that_a_callback_restores_in_shares():
    trained = compiled()
    fit(trained)
    path = FOLDER / "to-restore.keras"
    if RANK == 0:
        trained.save(path)

    def restore(mine):
        if RANK == 0:
            for to, value in zip(
                (*mine.variables, *mine.optimizer.variables),
                values(keras.models.load_model(path)),
                strict=True,
            ):
                to.assign(value)

    mine = compiled()
    with sharded():
        fit(mine, epochs=1)
        fit(mine, callbacks=[Does(on_train_begin=restore)])
    fit(trained)
    assert_same_state(mine, trained)


@check
def an_error_between_steps_of_shares():
    mine = compiled()
    with Messages() as messages, contextlib.suppress(Broken), sharded():
        fit(mine, callbacks=[breaks_behind(3)])
    assert messages.have("of the optimizer's variables, which have no value")
    reference = compiled()
    fit(reference, epochs=1, steps_per_epoch=3)
    for one, other in zip(
        mine.get_weights(), reference.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    with refused("has no value", "when training ended by an error"):
        values(mine)
    with pytest.raises(ValueError, match="has no value"):
        fit(mine)  # As without a strategy, so TensorFlow finds it.
    for variable in (
        v for v in mine.optimizer.variables if "momentum" in v.path
    ):
        variable.assign(np.full(variable.shape, 0.5))
        assert (variable.numpy() == 0.5).all()
    mine.compile(adam(), "mse")
    with sharded():
        fit(mine)
    values(mine)


class Counting(keras.optimizers.SGD):
    """Has a variable of which nothing says what it belongs to."""

    def build(self, variables):
        super().build(variables)
        self.updates = self.add_variable((), name="updates")

    def update_step(self, gradient, variable, learning_rate):
        self.updates.assign_add(1.0)
        super().update_step(gradient, variable, learning_rate)


@check
def what_cannot_be_shared_is_refused():
    mine = compiled(Counting(0.1))
    with refused("Counting", "updates", "lists with one for each"), sharded():
        fit(mine)
    mine = compiled()
    strategy = sharded()
    with refused("fit() and train_on_batch()", "leave updates out"), strategy:
        # From here on slots are where they are needed.
        mine.train_on_batch(X[:8], Y[:8])

        @tf.function
        def step(x, y):
            def one():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((mine(x) - y) ** 2)
                weights = mine.trainable_variables
                mine.optimizer.apply(tape.gradient(loss, weights), weights)
                return loss

            return strategy.run(one)

        step(X[:8], Y[:8])


@check
def a_commit_within_an_epoch_has_all_shares():
    folder = FOLDER / "backup-in-shares"
    mine, reference = compiled(), compiled()
    with contextlib.suppress(Broken), sharded():
        backup = kt.Backup(folder, every=2)
        fit(mine, callbacks=[backup, breaks_behind(5)])
    gather("left")
    mine = compiled()
    with sharded():
        fit(mine, callbacks=[kt.Backup(folder, every=2)])
    fit(reference)
    assert_same_state(mine, reference)
