"""Checks of a worker: data that use the model which trains on them."""

import itertools
import time

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from tests.kit.ranks import check
from tests.processes import small as s

BATCHES, SIZE = 3, 16


def rows(number):
    begin = number % BATCHES * SIZE
    return s.X[begin : begin + SIZE], s.Y[begin : begin + SIZE]


def predicts(it, x):
    return it.predict(x, verbose=0)


def calls(it, x):
    return np.array(it(x))


def evaluates(it, x):
    targets = np.zeros((len(x), 3))
    return it.evaluate(x, targets, verbose=0, return_dict=True)["loss"]


def batches(it, ask, number=None):
    """Targets on the way to what the model says."""
    for k in itertools.count() if number is None else range(number):
        x, y = rows(k)
        # Some batches need no model.
        yield x, y + 0.5 * ask(it, x) if k % 4 else y


class Asking(keras.utils.PyDataset):
    def __init__(self, it, ask, **options):
        super().__init__(**options)
        self.it, self.ask = it, ask

    def __len__(self):
        return BATCHES

    def __getitem__(self, number):
        x, y = rows(number)
        return x, y + 0.5 * self.ask(self.it, x)


class Hard(Asking):
    """Hard examples first."""

    def __init__(self, it):
        super().__init__(it, None)
        self.order = np.arange(s.COUNT)

    def __getitem__(self, number):
        chosen = self.order[number * SIZE : (number + 1) * SIZE]
        return s.X[chosen], s.Y[chosen]

    def on_epoch_end(self):
        errors = np.abs(self.it.predict(s.X, verbose=0) - s.Y).sum(1)
        self.order = np.argsort(-errors, kind="stable")


def one_by_one(it, data, peeked=0):
    """Train on batches that are read when they are due, but the first ones."""
    data = iter(data)
    for x, y in itertools.chain([next(data) for _ in range(peeked)], data):
        it.train_on_batch(x, y)


def of_generator(ask, **options):
    """A fit on a generator, and the same batch by batch."""
    number = 2 * BATCHES
    return (
        lambda it: s.fit(
            it,
            batches(it, ask),
            None,
            steps_per_epoch=BATCHES,
            epochs=2,
            **options,
        ),
        # Keras reads two batches before it trains.
        lambda it: one_by_one(it, batches(it, ask, number), peeked=2),
    )


def of_sequence(make):
    def epochs(it):
        data = make(it)
        data.on_epoch_end()
        for _ in range(2):
            yield from (data[k] for k in range(BATCHES))
            data.on_epoch_end()

    return (
        lambda it: s.fit(it, make(it), None, epochs=2),
        lambda it: one_by_one(it, epochs(it)),
    )


def dataset(it, ask, number=2 * BATCHES):
    return tf.data.Dataset.from_generator(
        lambda: batches(it, ask, number), output_signature=s.SPEC
    )


def assert_trained_in_turn(fits, options, **strategy):
    mine, alone, (fit, reference) = s.model(), s.model(), fits
    mine.compile("adam", "mse", **options)
    alone.compile("adam", "mse")
    with s.Strategy(**strategy):
        fit(mine)
    if s.RANK == 0:
        reference(alone)
    s.assert_same_model(mine, alone)
    assert not any(name.startswith("make_") for name in vars(mine))


@check
def data_that_ask_the_model_are_read_in_the_step_that_they_are_for():
    validated = of_generator(
        predicts,
        validation_data=Asking(s.model(), calls),
        validation_steps=BATCHES,
    )
    for fits, options in (
        (validated, {}),
        (of_generator(evaluates), {"run_eagerly": True}),
        (of_generator(calls), {"steps_per_execution": BATCHES}),
        (of_sequence(lambda it: Asking(it, calls)), {}),
    ):
        assert_trained_in_turn(fits, options)
    # Each rank has a part of the weights, and they meet at the end of an epoch.
    for strategy in {}, {"weights": "sharded"}:
        assert_trained_in_turn(of_sequence(Hard), {}, **strategy)


@check
def what_stops_early_leaves_nothing_that_reads():
    mine = s.model()
    stop = s.Does(on_epoch_end=lambda it: setattr(it, "stop_training", True))
    with s.Strategy():
        for _ in range(2):
            of_generator(predicts, callbacks=[stop])[0](mine)
        mine.evaluate(batches(mine, predicts, 4))
        mine.compile("adam", "mse", steps_per_execution=2)
        mine.predict((x,) for x, _ in batches(mine, calls, 5))
    s.assert_same_model(mine)


@check
def data_may_ask_another_model_wherever_they_are_read():
    """Steps do not write its variables: ranks get the same of it."""
    teacher = s.model(seed=3)

    def teaches(_, x):
        return predicts(teacher, x)

    def fit(it):
        s.fit(it, dataset(it, teaches).prefetch(2), None)

    ahead = fit, lambda it: one_by_one(it, batches(it, teaches, 2 * BATCHES))
    for fits in (of_generator(teaches), ahead):
        assert_trained_in_turn(fits, {})


def wide():
    return s.model(keras.layers.Dense(8192), keras.layers.Dense(3))


@check
def python_data_are_read_no_further_ahead_than_by_keras():
    """A callback may change what they return next."""
    number = 6
    for generates in (True, False):
        read, found = [], []

        class Counted(keras.utils.PyDataset):
            def __len__(self):
                return number

            def __getitem__(self, k, read=read):
                read.append(k)
                return rows(k)

        def settle(_, read=read, found=found, generates=generates):
            time.sleep(0.05)
            # Keras looks at two of a PyDataset first, and reads them again.
            looked_at = 0 if generates else 2
            found.append(len(read) - looked_at - len(found) - 1)

        data = Counted()
        x = (data[k] for k in range(number)) if generates else data
        settles = kt.EveryRank(s.Does(on_train_batch_end=settle))
        with s.Strategy():
            s.fit(s.model(), x, None, callbacks=[settles])
        # One, or two where it was waited for.
        assert len(found) == number and max(found) <= 2, found


@check
def what_data_cannot_ask_is_refused_on_all_ranks():
    def trains(it, x):
        it.train_on_batch(x, np.zeros((SIZE, 3)))

    def on_rank_1(it, x):
        return predicts(it, x) if s.RANK else 0.0

    def at_last(it):
        data = itertools.chain([rows(0)] * 3, batches(it, predicts))
        s.fit(it, (batch for batch in data), None, steps_per_epoch=8)

    def later(ask):
        return lambda it: of_generator(ask)[0](it)

    ahead = "read ahead, so ranks would get different batches"
    for make, fit, options, *words in (
        (
            *(s.model, lambda it: s.fit(it, dataset(it, predicts), None)),
            *({}, ahead, "Give fit a generator or a PyDataset"),
        ),
        (
            *(s.model, at_last),
            *({}, ahead, "Use the model in the first two batches, too"),
        ),
        (
            s.model,
            lambda it: s.fit(it, Asking(it, predicts, workers=2), None),
            *({}, ahead, "Give the PyDataset workers=1"),
        ),
        (
            *(s.model, lambda it: s.fit(it, dataset(it, trains), None)),
            *({}, "train_on_batch needs all ranks"),
        ),
        (
            *(wide, later(predicts), {"weights": "sharded"}),
            "Call it in a callback, or in on_epoch_end of a PyDataset",
        ),
        (
            *(s.model, later(predicts), {"sync_every": 8}),
            "ranks have the same weights only at the end",
        ),
    ):
        mine = make()
        with s.refused(*words), s.Strategy(**options):
            fit(mine)
    with s.refused("rank 0 does not; rank 1 calls predict"), s.Strategy():
        mine = s.model()
        later(on_rank_1)(mine)
    # They go on together.
    s.assert_as_one_process(s.eager())
