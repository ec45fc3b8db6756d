"""Every kind of input gives what one device gives, split and to each tower."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.exactness import models as m
from tests.kit.compare import assert_exact
from tests.kit.long import long_but
from tests.kit.training import compiled, strategy_of

BATCH = 8
# 53 examples: neither the number of examples nor that of batches divides.
COUNT = 53
X, Y, W = m.FEATURES[:COUNT], m.LABELS[:COUNT], m.WEIGHTS[:COUNT]
TOWERS = 3


class Rows(keras.utils.PyDataset):
    """A PyDataset of batches that notes which of them were drawn."""

    def __init__(self, batch=BATCH, **kwargs):
        super().__init__(**kwargs)
        self.batch = batch
        self.epochs = 0

    def __len__(self):
        return -(-COUNT // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return X[rows], Y[rows], W[rows]

    def on_epoch_end(self):
        self.epochs += 1


def batches(batch=BATCH):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y, W))
    return dataset.batch(batch)


def unknown_length(batch=BATCH):
    return batches(batch).filter(lambda *_: True)


def from_generator(batch=BATCH):
    """A generator for two epochs."""
    for start in 2 * list(range(0, COUNT, batch)):
        rows = slice(start, start + batch)
        yield X[rows], Y[rows], W[rows]


def of_numpy(batch=BATCH):
    return {"x": X, "y": Y, "sample_weight": W, "batch_size": batch}


def shuffled(batch=BATCH):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y, W))
    return dataset.shuffle(COUNT, seed=3).batch(batch)


SOURCES = {
    "numpy": of_numpy,
    "tf.data": lambda b=BATCH: {"x": batches(b)},
    "unknown length": lambda b=BATCH: {"x": unknown_length(b)},
    "shuffled": lambda b=BATCH: {"x": shuffled(b)},
    "PyDataset": lambda b=BATCH: {"x": Rows(b)},
    "workers": lambda b=BATCH: {
        "x": Rows(b, workers=2, use_multiprocessing=False)
    },
    "generator": lambda b=BATCH: {
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


# That with workers is a PyDataset, too; other tests train on arrays.
@pytest.mark.parametrize(
    "source",
    long_but(lambda name: name not in ("numpy", "PyDataset"), SOURCES),
)
def test_split(source):
    strategy = strategy_of(TOWERS)
    assert_exact(compiled(), fitting(source), strategy)


@pytest.mark.parametrize(
    "source", [s for s in SOURCES if s not in ("generator", "workers")]
)
def test_each(source):
    # 53 examples in batches of 4 are 14: the last step has two of them, and
    # the second one has a single example.
    strategy = strategy_of(TOWERS, batches="each")
    assert_exact(
        compiled(), fitting(source, 4), strategy, fitting(source, 4 * TOWERS)
    )


def test_each_of_a_generator():
    strategy = strategy_of(TOWERS, batches="each")
    act = fitting("generator", 4, epochs=1, steps_per_epoch=3)
    reference = fitting("generator", 12, epochs=1, steps_per_epoch=3)
    assert_exact(compiled(), act, strategy, reference)


@pytest.mark.parametrize(
    "towers,batch", long_but((2, 5).__ne__, [(2, 5), (3, 1), (8, 5)])
)
def test_small_batches_to_each(towers, batch):
    strategy = strategy_of(towers, batches="each")
    assert_exact(
        compiled(),
        fitting("tf.data", batch, epochs=1),
        strategy,
        fitting("tf.data", batch * towers, epochs=1),
    )


@pytest.mark.parametrize("each", [False, True])
def test_batches_of_one_example_on_eight_towers(each):
    strategy = strategy_of(8, batches="each" if each else "split")

    def act(model, batch=1):
        return model.fit(
            X[:9], Y[:9], batch_size=batch, shuffle=False, verbose=0
        )

    assert_exact(
        compiled(), act, strategy, lambda model: act(model, 8 if each else 1)
    )


@pytest.mark.parametrize("seed", long_but((1).__eq__, [1, 2]))
def test_numpy_is_shuffled_alike(seed):
    def act(model):
        keras.utils.set_random_seed(seed)
        return model.fit(**of_numpy(7), epochs=3, verbose=0)

    assert_exact(compiled(), act, strategy_of(3))


def test_shuffling_by_batch():
    act = fitting("numpy", epochs=3, shuffle="batch")
    assert_exact(compiled(), act, strategy_of(2))


@pytest.mark.parametrize(
    "source, each",
    long_but(
        lambda case: case[1] == (case[0] == "unknown length"),
        itertools.product(
            ("tf.data", "unknown length", "PyDataset"), (False, True)
        ),
    ),
)
def test_fewer_steps_than_batches(source, each):
    # One device goes on in the second epoch where the first one stopped.
    towers = 2
    strategy = strategy_of(towers, batches="each" if each else "split")
    factor = towers if each else 1
    assert_exact(
        compiled(),
        fitting(source, 8 // factor, steps_per_epoch=3),
        strategy,
        fitting(source, 8, steps_per_epoch=3),
    )


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_more_steps_than_batches():
    act = fitting("tf.data", steps_per_epoch=9)
    assert_exact(compiled(), act, strategy_of(TOWERS))


@pytest.mark.parametrize("source", ["numpy", "tf.data"])
def test_steps_per_execution(source):
    make = compiled(steps_per_execution=3)
    assert_exact(make, fitting(source), strategy_of(TOWERS))


@pytest.mark.parametrize(
    "validation",
    long_but("tf.data".__eq__, ["numpy", "tf.data", "PyDataset"]),
)
def test_validation_of_another_batch_size(validation):
    def act(model):
        data = {
            "numpy": (X[:31], Y[:31], W[:31]),
            "tf.data": unknown_length(5),
            "PyDataset": Rows(5),
        }[validation]
        return fitting(
            "numpy",
            validation_data=data,
            validation_batch_size=5 if validation == "numpy" else None,
            validation_freq=1,
        )(model)

    assert_exact(compiled(), act, strategy_of(3))


def test_validation_steps():
    act = fitting(
        "tf.data", validation_data=batches(5), validation_steps=3, epochs=3
    )
    assert_exact(compiled(), act, strategy_of(3))


@pytest.mark.parametrize(
    "source",
    long_but(
        ("PyDataset", "generator").__contains__,
        ["numpy", "unknown length", "PyDataset", "generator"],
    ),
)
def test_evaluate_and_predict(source):
    def act(model):
        data = SOURCES[source]()
        steps = data.pop("steps_per_epoch", None)
        evaluated = model.evaluate(**data, steps=steps, verbose=0)
        data = SOURCES[source]()
        for name in ("y", "sample_weight", "steps_per_epoch"):
            data.pop(name, None)
        predicted = model.predict(**data, steps=steps, verbose=0)
        return evaluated, predicted

    assert_exact(compiled(), act, strategy_of(TOWERS))


@pytest.mark.parametrize("count", [1, 3, 9])
def test_on_batch(count):
    def act(model):
        x, y = X[:count], Y[:count]
        trained = [model.train_on_batch(x, y) for _ in range(2)]
        return trained, model.test_on_batch(x, y), model.predict_on_batch(x)

    assert_exact(compiled(), act, strategy_of(TOWERS))


def test_no_batch_of_a_generator_is_lost_or_doubled():
    seen = []

    class Seen(keras.Sequential):
        def train_step(self, data):
            tf.py_function(lambda x: seen.extend(x.numpy()), [data[0]], [])
            return super().train_step(data)

    def numbered():
        for number in range(9):
            yield np.full((5, 1), number, "float32"), np.zeros((5, 1))

    model = Seen([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with strategy_of(2):
        model.fit(numbered(), verbose=0)
    assert sorted(float(x[0]) for x in seen) == [n // 5 for n in range(45)]


def test_a_borrowed_example_is_given_to_towers_that_have_none():
    sizes = []

    class Sizes(keras.Sequential):
        def train_step(self, data):
            tf.py_function(lambda x: sizes.append(len(x)), [data[0]], [])
            return super().train_step(data)

    model = Sizes([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with strategy_of(4):
        model.train_on_batch(X[:2], Y[:2])
    assert sizes == [1, 1, 1, 1]


@pytest.mark.parametrize("batch, each", [(8, True), (7, False)])
def test_dataset_that_the_user_distributed(batch, each):
    # The dataset says what each tower gets, so "each" changes nothing.
    strategy = strategy_of(TOWERS, batches="each" if each else "split")

    def act(model, distribute=strategy.experimental_distribute_dataset):
        trained = model.fit(distribute(batches(batch)), epochs=2, verbose=0)
        evaluated = model.evaluate(distribute(batches(batch)), verbose=0)
        predicted = model.predict(
            distribute(batches(batch).map(lambda x, *_: x)), verbose=0
        )
        return trained.history, evaluated, predicted

    def reference(model):
        return act(model, lambda dataset: dataset)

    assert_exact(compiled(), act, strategy, reference)


def test_datasets_that_the_user_distributed_from_a_function():
    strategy = strategy_of(2)

    def act(model):
        dataset = strategy.distribute_datasets_from_function(
            lambda _: batches(4)
        )
        return model.fit(dataset, verbose=0)

    assert_exact(
        compiled(),
        act,
        strategy,
        # Keras counts one more iteration where it has to look for the end.
        lambda model: model.fit(batches(8).filter(lambda *_: True), verbose=0),
    )
