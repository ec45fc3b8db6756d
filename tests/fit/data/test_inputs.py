"""Every kind of input gives what one device gives.

Split or to each tower, and also as it is copied ahead to accelerators, which
is done here on logical CPUs.
"""

import functools
import itertools
import time

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers.fit.data.data_use import DataUse
from keras_towers.fit.data.epoch_iterator import TowerEpochIterator
from keras_towers.inspection.conformance import case_models as m
from tests.kit.compare import assert_exact
from tests.kit.sampling import long_unless, sample_of
from tests.kit.training import linear, strategy_of

pytestmark = pytest.mark.alternate

BATCH = 8
# 53 examples: towers divide neither the examples nor the batches evenly.
COUNT = 53
X, Y, W = m.FEATURES[:COUNT], m.LABELS[:COUNT], m.WEIGHTS[:COUNT]


class Rows(keras.utils.PyDataset):
    """A PyDataset of batches."""

    def __init__(self, batch=BATCH, **kwargs):
        super().__init__(**kwargs)
        self.batch = batch

    def __len__(self):
        return -(-COUNT // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return X[rows], Y[rows], W[rows]


def batches(batch=BATCH):
    return tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(batch)


def unknown_length(batch=BATCH):
    return batches(batch).filter(lambda *_: True)


def fixed_size(batch=BATCH):
    """Of 48 examples; where it divides them, TensorFlow knows the size."""
    dataset = batches(1).unbatch().take(48)
    return dataset.batch(batch, drop_remainder=48 % batch == 0)


def from_generator(batch=BATCH):
    """A generator for two epochs."""
    for start in 2 * list(range(0, COUNT, batch)):
        rows = slice(start, start + batch)
        yield X[rows], Y[rows], W[rows]


def shuffled(batch=BATCH):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y, W))
    return dataset.shuffle(COUNT, seed=3).batch(batch)


SOURCES = {
    "numpy": lambda b: {"x": X, "y": Y, "sample_weight": W, "batch_size": b},
    "tf.data": lambda b: {"x": batches(b)},
    "unknown length": lambda b: {"x": unknown_length(b)},
    "fixed size": lambda b: {"x": fixed_size(b)},
    "shuffled": lambda b: {"x": shuffled(b)},
    "PyDataset": lambda b: {"x": Rows(b)},
    "generator": lambda b: {
        "x": from_generator(b),
        "steps_per_epoch": -(-COUNT // b),
    },
}


def fitting(source, batch=BATCH, epochs=2, **kwargs):
    """Fit, on fresh data, without Keras's own shuffling unless asked for."""

    def act(model):
        arguments = {**SOURCES[source](batch), "shuffle": False, **kwargs}
        return model.fit(epochs=epochs, verbose=0, **arguments)

    return act


SPLIT, EACH = "split", "each"
THREE_STEPS = {"steps_per_epoch": 3}
# By what three towers get and whether that is copied ahead: source, batch size
# and arguments of fit. To each go 14 batches of 4: the last step has two of
# them, and the second one has a single example.
FITS = {
    (SPLIT, False): [
        ("unknown length", 7, {}),
        ("shuffled", 7, {}),
        ("numpy", 7, {"shuffle": True, "epochs": 3}),
        # One device goes on in the second epoch where the first one stopped.
        ("PyDataset", 8, THREE_STEPS),
        # More than there are.
        ("tf.data", 8, {"steps_per_epoch": 9}),
    ],
    # Pieces of 3, 3 and 1, in the end of 2, 2 and 0; and batches that are too
    # small for all towers.
    (SPLIT, True): [
        ("numpy", 7, {}),
        ("tf.data", 1, THREE_STEPS),
        ("unknown length", 7, {}),
    ],
    (EACH, False): [
        ("PyDataset", 4, {}),
        ("tf.data", 18, {}),
        ("unknown length", 4, THREE_STEPS),
    ],
    (EACH, True): [
        ("generator", 4, {"epochs": 1, **THREE_STEPS}),
        ("tf.data", 11, {}),
        ("tf.data", 4, THREE_STEPS),
        ("unknown length", 4, {}),
        # TensorFlow drops an incomplete group where it knows the sizes of all.
        ("fixed size", 12, {}),
    ],
}


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("kind, ahead", sample_of(FITS, 4))
def test_fit(kind, ahead):
    """One model, which is traced once for most of them."""
    towers = 3

    def act(model, factor=1):
        histories = []
        for source, batch, arguments in FITS[kind, ahead]:
            # The same order of shuffled data.
            keras.utils.set_random_seed(11)
            fits = fitting(source, batch * factor, **arguments)
            histories.append((fits(model).history, model.get_weights()))
        return histories

    strategy = strategy_of(towers, ahead, batches=kind)
    factor = towers if kind == EACH else 1
    # Keras counts one more iteration where it has to look for the end.
    reference = functools.partial(act, factor=factor)
    assert_exact(linear, act, strategy, reference, in_graph=True)


def test_a_generator_is_read_only_for_steps():
    """What is prefetched beyond them is lost, and ranks lose other numbers."""

    def endless(read):
        for number in itertools.count():
            read.append(number)
            yield X[:BATCH], Y[:BATCH], W[:BATCH]

    read, validated = [], []
    model = linear(steps_per_execution=2)
    with strategy_of(2):
        data = endless(read)
        model.fit(
            data,
            epochs=3,
            initial_epoch=1,
            steps_per_epoch=3,
            validation_data=endless(validated),
            validation_steps=4,
            verbose=0,
        )
        assert len(read) == 8
        # Keras begins each validation with the two batches it looked at first.
        assert len(validated) == 6
        model.evaluate(data, steps=5, verbose=0)
        assert len(read) == 14


class Endless(keras.utils.PyDataset):
    """Counts how many batches have been read."""

    read = 0

    def __getitem__(self, index):
        self.read += 1
        return X[:BATCH], Y[:BATCH]

    @property
    def num_batches(self):
        return None


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", [SPLIT, EACH])
@pytest.mark.parametrize("generates", [False, True])
def test_python_data_is_read_no_further_ahead_than_by_keras(
    generates, kind, ahead
):
    """A callback may change what it returns next."""
    data, found = Endless(), []
    # Keras looks at two batches of a PyDataset first, and reads them again.
    looked_at = 0 if generates else 2
    taken = 2 if kind == EACH else 1

    def settle(step, logs):
        time.sleep(0.05)
        found.append(data.read - looked_at - taken * (step + 1))

    settles = keras.callbacks.LambdaCallback(on_train_batch_end=settle)
    x = (data[k] for k in itertools.count()) if generates else data
    with strategy_of(2, ahead, batches=kind):
        linear().fit(x, steps_per_epoch=5, verbose=0, callbacks=[settles])
    # One, or two where it was waited for.
    assert max(found) <= 2, found


def test_on_batch():
    """Batches of any size; one tower has none of a batch of one."""

    def make():
        return linear(metrics=["accuracy"])

    def act(model):
        found = []
        for count in (7, 1):
            x, y = X[:count], Y[:count]
            found.append(model.train_on_batch(x, y))
            found.append(model.test_on_batch(x, y))
            found.append(model.predict_on_batch(x))
        weights = {0: 1.0, 1: 0.5, 2: 2.0}
        found.append(model.train_on_batch(X[:7], Y[:7], class_weight=weights))
        found.append(model.train_on_batch(X[:7], Y[:7], return_dict=True))
        return found

    assert_exact(make, act, strategy_of(2))


@pytest.mark.parametrize("kind", long_unless(SPLIT.__eq__, [EACH, SPLIT]))
def test_dataset_that_the_user_distributed(kind):
    # The dataset says what each tower gets, so "each" changes nothing.
    strategy = strategy_of(2, batches=kind)

    def act(model, distribute=strategy.experimental_distribute_dataset):
        trained = model.fit(distribute(batches(7)), verbose=0).history
        if kind == EACH:
            return trained
        inputs = distribute(batches(7).map(lambda x, *_: x))
        return trained, model.predict(inputs, verbose=0)

    assert_exact(linear, act, strategy, lambda model: act(model, lambda d: d))


def test_a_dataset_that_another_strategy_distributed_is_refused():
    model = linear()
    for make in (kt.TowerStrategy, tf.distribute.MirroredStrategy):
        other = make(["cpu:0", "cpu:1"])
        data = other.experimental_distribute_dataset(batches(7))
        said = f"distributed by another .*{type(other).__name__}.*: pass"
        for kind in ("fit", "evaluate"):
            with strategy_of(2), pytest.raises(kt.TowerError, match=said):
                getattr(model, kind)(data, verbose=0)


def test_towers_without_rows_are_warned_of_once(logged):
    strategy = strategy_of(3)
    for _ in range(2):
        with strategy:
            linear(run_eagerly=True).fit(X[:4], Y[:4], batch_size=2, verbose=0)
    warning = "WARNING", "a batch of 2 cannot occupy 3 towers, so some "
    ((level, said),) = logged("cannot occupy")
    assert (level, said[: len(warning[1])]) == warning


def test_datasets_that_the_user_distributed_from_a_function():
    strategy = strategy_of(2)

    def act(model):
        dataset = strategy.distribute_datasets_from_function(
            lambda _: batches(4)
        )
        return model.fit(dataset, verbose=0)

    reference = fitting("unknown length", 8, epochs=1)
    assert_exact(linear, act, strategy, reference, in_graph=True)


class Counting(m.OwnStep):
    """Counts its steps in a metric, which needs no batch."""

    def __init__(self):
        super().__init__()
        self.steps = keras.metrics.Sum(name="steps")

    @property
    def metrics(self):
        return [*super().metrics, self.steps]

    def train_step(self, data):
        logs = super().train_step(data)
        self.steps.update_state(1.0)
        return {**logs, "steps": self.steps.result()}


def test_the_end_of_data_of_unknown_length_counts_as_no_step():
    """Keras alone counts it, and its ``History`` has one step too many."""
    model = Counting()
    model.compile(m.momentum())
    with strategy_of(2):
        data = unknown_length().map(lambda x, y, _: (x, y))
        history = model.fit(data, epochs=2, verbose=0).history
    assert history["steps"] == 2 * [-(-COUNT // BATCH)]


# Of batches that are passed over.
EPOCHS, BATCHES = 2, 7


def started(source, steps_per_execution=1):
    keras.utils.set_random_seed(5)
    return TowerEpochIterator(
        DataUse(
            strategy_of(2)._config, strategy_of(2)._config.places("fit"), "fit"
        ),
        steps_per_execution=steps_per_execution,
        # Keras shuffles them: one with TensorFlow's, one with Python's
        # random numbers.
        shuffle=source in ("numpy", "PyDataset"),
        **SOURCES[source](8),
    )


def drawn(iterator, epochs, left_out=0):
    """The batches of some epochs, each with its epoch, as ``fit`` draws."""
    found = []
    for epoch in range(EPOCHS - epochs, EPOCHS):
        with iterator.catch_stop_iteration():
            for _, _, data in iterator:
                for _ in range(iterator.steps_per_execution):
                    batch = tf.nest.flatten(next(data))[0]
                    if left_out:
                        left_out -= 1
                        continue
                    found.append((epoch, batch.numpy().tolist()))
    return found


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "source, steps_per_execution",
    sample_of([("numpy", 4), ("unknown length", 1), ("PyDataset", 4)]),
)
def test_skipping_batches_continues_with_the_next_ones(
    source, steps_per_execution
):
    whole = drawn(started(source, steps_per_execution), EPOCHS)
    assert len(whole) >= EPOCHS * BATCHES
    for batches in (0, 1, 7, 10):
        it = started(source, steps_per_execution)
        epochs, left_out = it.skip_batches(batches)
        found = drawn(it, EPOCHS - epochs, left_out)
        assert found == whole[batches:], batches


def test_data_that_ends_too_early_ends_passing_over():
    it = started("tf.data")
    it._distributed_dataset = it._distributed_dataset.take(0)
    assert it.skip_batches(3) == (0, 0)
