"""Checks of a worker: ranks that update weights of their own between rounds."""

import functools
import itertools
import pathlib
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from tests.kit.again import begin_again
from tests.kit.compare import assert_all_close, assert_same_history
from tests.kit.meshes import layout_map, mesh_of
from tests.kit.ranks import check
from tests.processes import small as s

FOLDER = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path()
RANKS = 2
# So many for each of four towers.
BATCH = 8
COUNT = 40
EPOCHS = 2


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def fit(mine, *callbacks, count=COUNT):
    options = {"batch_size": BATCH, "epochs": EPOCHS, "callbacks": callbacks}
    return s.fit(mine, s.X[:count], s.Y[:count], **options)


def by_hand(mine, count, steps, outer_momentum, outer_learning_rate):
    """This rank's weights after each batch and epoch, as plain Keras has them.

    Args:
        mine: makes a model.
        count: the number of examples.
        steps: of a round.
        outer_momentum: of the outer step.
        outer_learning_rate: likewise.
    """
    ranks = [mine() for _ in range(RANKS)]
    for one in ranks:
        one.optimizer.build(one.trainable_variables)
    trained = [one.trainable_variables for one in ranks]
    start = [w.numpy() for w in trained[0]]
    velocity = [np.zeros_like(w) for w in start]
    shares, seen = [], []

    def end():
        share = np.mean(shares, 0)
        for i, weights in enumerate(zip(*trained, strict=True)):
            changes = [start[i] - w.numpy() for w in weights]
            change = np.tensordot(share, changes, 1)
            velocity[i] = outer_momentum * velocity[i] + change
            change = change + outer_momentum * velocity[i]
            start[i] = start[i] - outer_learning_rate * change
            for weight in weights:
                weight.assign(start[i])
        shares.clear()

    for _ in range(EPOCHS):
        for first in range(0, count, BATCH):
            batch = np.arange(first, min(first + BATCH, count))
            rows = np.array_split(batch, RANKS)
            shares.append([len(own) / len(batch) for own in rows])
            for one, own in zip(ranks, rows, strict=True):
                if len(own):
                    one.train_on_batch(s.X[own], s.Y[own])
            if len(shares) == steps:
                end()
            seen.append(ranks[s.RANK].get_weights())
        if shares:
            end()
        # The end of an epoch.
        for one in ranks[1:]:
            one.set_weights(ranks[0].get_weights())
            pairs = zip(
                one.optimizer.variables,
                ranks[0].optimizer.variables,
                strict=True,
            )
            for variable, value in pairs:
                variable.assign(value)
        seen.append(ranks[s.RANK].get_weights())
    return seen


def equal_on_ranks(model):
    first, other = s.gather([w.tobytes() for w in model.get_weights()])
    return first == other


def assert_rounds(steps, strategy, count=COUNT, layers=list, **outer):
    def make():
        return s.model(*layers(), optimizer=momentum())

    mine, seen = make(), []

    def look(model):
        seen.append(model.get_weights())

    # At the end of an epoch: what ``ModelCheckpoint`` would save.
    look = s.Does(on_train_batch_end=look, on_epoch_end=look)
    with s.Strategy(sync_every=steps, **strategy, **outer) as strategy:
        assert f"sync_every={steps} changes" in strategy.describe()
        history = fit(mine, look, count=count)
    s.assert_equal_on_ranks(history.history)
    s.assert_same_model(mine)
    wanted = by_hand(make, count, steps, **outer)
    for found, expected in zip(seen, wanted, strict=True):
        assert_all_close(found, expected, 2e-5)
    assert int(mine.optimizer.iterations) == EPOCHS * -(-count // BATCH)


def normalized():
    return [keras.layers.BatchNormalization()]


@check
def rounds_take_the_mean_of_the_ranks_weights():
    # The last round of an epoch has one step only.
    assert_rounds(2, {}, outer_momentum=0.0, outer_learning_rate=1.0)


@check
def a_rank_without_rows_skips_its_update():
    """Its momentum and statistics wait; the last batch has one example."""
    outer = {"outer_momentum": 0.0, "outer_learning_rate": 1.0}
    assert_rounds(4, {}, COUNT + 1, normalized, **outer)


def assert_rounds_in_shards(**options):
    """A rank without rows skips its update here, too."""
    outer = {"outer_momentum": 0.9, "outer_learning_rate": 0.7}
    options["shard_over"] = "process"
    assert_rounds(3, options, COUNT + 1, normalized, **outer)


@check
def rounds_on_a_mesh():
    layouts = {".*dense.*/kernel": ("model", None), ".*dense/bias": ("batch",)}
    assert_rounds_in_shards(layouts=layout_map(mesh_of(2, 2), layouts))


@check
def rounds_with_weights_in_shards():
    assert_rounds_in_shards(towers=2, weights="sharded")


@check
def rounds_of_one_step_are_those_of_one_process():
    # The mean of steps without a state is the step of the mean, also where a
    # rank has no example of the last batch.
    rows = slice(COUNT + 1)
    s.assert_as_one_process(
        s.model(),
        lambda m: s.fit(m, s.X[rows], s.Y[rows], batch_size=BATCH, epochs=2),
        strategy=s.Strategy(sync_every=1),
    )


class Seen(keras.metrics.Metric):
    """Counts examples; its result is its variable."""

    def __init__(self):
        super().__init__(name="seen")
        self.seen = self.add_variable((), "zeros", dtype="int32")

    def update_state(self, y, outputs, sample_weight=None):
        self.seen.assign(self.seen + tf.shape(y)[0])

    def result(self):
        return self.seen


@check
def steps_that_run_eagerly_are_those_of_one_process():
    """Each rank computes them on the whole batch, so no round begins."""

    def act(mine):
        history = s.fit(mine, batch_size=BATCH, epochs=2).history
        return history, mine.train_on_batch(s.X[:9], s.Y[:9])

    made = [s.eager(metrics=["mae", Seen()]) for _ in range(2)]
    strategy = s.Strategy(sync_every=2)
    s.assert_as_one_process(made[0], act, made[1], strategy=strategy)


@check
def metrics_go_on_within_an_epoch_from_those_of_a_call_in_a_callback():
    """Metrics that are summed over ranks count once in the epoch's logs."""

    def act(mine, name):
        batches = itertools.count()

        def look(model):
            if next(batches) == 1:
                getattr(model, name)(s.X[:10], s.Y[:10], verbose=0)

        look = s.Does(on_train_batch_end=look)
        return s.fit(mine, batch_size=BATCH, callbacks=[look])

    for name in "evaluate", "fit":
        s.assert_as_one_process(
            s.model(),
            functools.partial(act, name=name),
            strategy=s.Strategy(sync_every=1),
        )


@check
def rounds_end_where_weights_are_used():
    mine = s.model()
    with s.Strategy(sync_every=100):
        for use in (
            lambda: mine.predict(s.X, verbose=0),
            lambda: mine.evaluate(s.X, s.Y, verbose=0),
        ):
            mine.train_on_batch(s.X[:BATCH], s.Y[:BATCH])
            assert not equal_on_ranks(mine)
            s.assert_equal_on_ranks(np.asarray(use()).tobytes())
            assert equal_on_ranks(mine)
        mine.train_on_batch(s.X[:BATCH], s.Y[:BATCH])
    s.assert_same_model(mine)


@check
def after_a_round_that_only_some_ranks_went_on_with():
    mine = s.model()
    strategy = s.Strategy(sync_every=3)
    with strategy, s.Messages() as messages:
        s.fit(mine)
        (state,) = strategy._update.local_sgd._round_of.values()
        # As if an error had ended the steps of rank 1 later.
        state.updates.assign(1 + s.RANK)
        s.fit(mine)
    assert messages.have("1 of 'sgd'") == (s.RANK == 0)
    s.assert_same_model(mine)


@check
def a_backup_within_an_epoch_keeps_what_all_ranks_have_counted():
    """Each rank counts its own examples; the ranks' sums are logged.

    Only rank 0 needs the file.
    """
    strategy = s.Strategy(sync_every=4)

    def trained(name, mine, *callbacks):
        folder = FOLDER / f"{name} of rank {s.RANK}"
        backup = kt.Backup(folder, every=2)
        with strategy:
            return fit(mine, backup, *callbacks)

    undisturbed = s.model(optimizer=momentum())
    wanted = trained("undisturbed", undisturbed)
    with pytest.raises(s.Boom):
        trained("broken", s.model(optimizer=momentum()), s.breaks_behind(3))
    begin_again()
    resumed = s.model(optimizer=momentum())
    found = trained("broken", resumed)
    assert_same_history(found.history, wanted.history)
    s.assert_same_model(resumed, undisturbed)


@check
def rounds_that_cannot_be():
    strategy = s.Strategy(sync_every=2)
    with strategy.scope():
        mine = s.model()
    with s.refused("custom training loop", "sync_every"):
        s.own_step(strategy, mine)((s.X, s.Y))
