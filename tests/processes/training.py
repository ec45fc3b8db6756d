"""Checks of a worker: what users do with a strategy on two ranks."""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import keras_towers as kt
from tests.exactness import transformers
from tests.kit.ranks import check
from tests.processes.small import (
    COUNT,
    RANK,
    SHORT,
    SPEC,
    Messages,
    Strategy,
    X,
    Y,
    assert_equal_on_ranks,
    assert_same_history,
    assert_same_model,
    forget_seed,
    gather,
    model,
    refused,
)

FOLDER = pathlib.Path(sys.argv[1])


@check
def attributes():
    strategy = Strategy()
    assert (strategy.rank, strategy.size) == (RANK, 2)
    assert (strategy.local_rank, strategy.local_size) == (RANK, 2)
    assert strategy.is_chief == (RANK == 0)
    if isinstance(strategy, kt.HorovodStrategy):
        assert strategy.mpi_enabled() is False
    assert strategy.num_replicas_in_sync == 2
    assert "rank" in strategy.describe()


@check
def weights_of_rank_0_whatever_the_seeds():
    mine = model(seed=RANK)
    with Strategy():
        mine.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    reference = model(seed=0)
    reference.fit(X, Y, epochs=2, shuffle=False, verbose=0)
    assert_same_model(mine, reference)


@check
def optimizer_state_of_rank_0():
    mine = model(seed=RANK)
    mine.compile(keras.optimizers.Adam(0.01), "mse")
    mine.fit(X, Y * (RANK + 1), shuffle=False, verbose=0)
    with Strategy():
        mine.fit(X, Y, shuffle=False, verbose=0)
    reference = model(seed=0)
    reference.compile(keras.optimizers.Adam(0.01), "mse")
    for _ in range(2):
        reference.fit(X, Y, shuffle=False, verbose=0)
    assert_same_model(mine, reference)
    assert int(mine.optimizer.iterations) == 4


@check
def seeded_shuffle_is_that_of_one_process():
    mine, reference = model(), model()
    keras.utils.set_random_seed(3)
    with Strategy():
        history = mine.fit(X, Y, epochs=3, batch_size=7, verbose=0)
    keras.utils.set_random_seed(3)
    expected = reference.fit(X, Y, epochs=3, batch_size=7, verbose=0)
    assert_same_model(mine, reference)
    assert_same_history(history, expected)


class Batches(keras.utils.PyDataset):
    """Notes which examples are read, in which order."""

    def __init__(self, **options):
        super().__init__(**options)
        self.read = []

    def __len__(self):
        return 7

    def __getitem__(self, index):
        self.read.append(index)
        return X[index::7], Y[index::7]


@check
def unseeded_shuffles_agree_and_change_by_epoch():
    mine = model()
    forget_seed()
    seen = []

    class Look(keras.layers.Layer):
        def call(self, x):
            tf.py_function(lambda v: seen.append(v.numpy()), [x], [])
            return x

    looks = keras.Sequential([Look(), keras.layers.Dense(3)])
    looks.compile("sgd", "mse", run_eagerly=True)
    with Strategy():
        mine.fit(X, Y, epochs=3, verbose=0)
        looks.fit(X, Y, epochs=2, batch_size=COUNT, verbose=0)
    assert_same_model(mine)
    first, second = (np.concatenate(gather(rows)) for rows in seen[-2:])
    for rows in (first, second):
        assert (np.sort(rows, 0) == np.sort(X, 0)).all()
    assert (first != second).any()

    batches = Batches()
    import random

    random.seed(RANK)
    with Strategy():
        mine.fit(batches, epochs=2, verbose=0)
    assert_equal_on_ranks(batches.read)
    assert_same_model(mine)


@check
def unseeded_dataset_is_warned_of():
    mine = model()
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    with Strategy(), Messages() as messages:
        mine.fit(data.shuffle(COUNT, seed=1).batch(8), verbose=0)
        assert not messages.have("without a seed")
        forget_seed()
        mine.fit(data.shuffle(COUNT).batch(8), verbose=0)
        assert messages.have("without a seed")


@check
def batch_smaller_than_the_ranks_is_warned_of_and_exact():
    mine, reference = model(), model()
    options = {"batch_size": 1, "shuffle": False, "verbose": 0}
    with Strategy(), Messages() as messages:
        mine.fit(X, Y, **options)
        assert messages.have("a batch of 1 cannot occupy 2") == (RANK == 0)
    reference.fit(X, Y, **options)
    assert_same_model(mine, reference)


@check
def random_layers_draw_as_one_process():
    def dropping(seed):
        mine = model(seed=seed)
        layers = [*mine.layers, keras.layers.Dropout(0.4)]
        mine = keras.Sequential([keras.layers.Input((4,)), *layers])
        mine.compile("sgd", "mse")
        return mine

    mine, reference = dropping(RANK), dropping(0)
    with Strategy(random="global"):
        found = mine.fit(X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0)
    wanted = reference.fit(
        X, Y, batch_size=7, epochs=2, shuffle=False, verbose=0
    )
    assert_same_model(mine, reference)
    assert_same_history(found, wanted)


@check
def transformers_draw_as_one_process():
    for name in ("smallest", "vit", "bert"):
        mine, reference = transformers.make(name), transformers.make(name)
        with Strategy(exact=True):
            found = transformers.train(name, mine)
        wanted = transformers.train(name, reference)
        assert_same_model(mine, reference)
        assert_same_history(found, wanted)


@check
def random_layers_draw_as_one_process_on_joined_batches():
    """Every rank has data of its own, which ends with a smaller batch."""

    def dropping():
        mine = model()
        layers = [*mine.layers, keras.layers.Dropout(0.4, seed=5)]
        mine = keras.Sequential([keras.layers.Input((4,)), *layers])
        mine.compile("sgd", "mse")
        return mine

    own, reference = dropping(), dropping()
    x, y = X[RANK * 20 : RANK * 20 + 20], Y[RANK * 20 : RANK * 20 + 20]
    with Strategy(batches="each", random="global"):
        own.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for start in (0, 8, 16):
        rows = [
            i
            for rank in (0, 20)
            for i in range(rank + start, min(rank + start + 8, rank + 20))
        ]
        reference.train_on_batch(X[rows], Y[rows])
    assert_same_model(own, reference)


@check
def evaluate_and_predict():
    mine = model()
    outputs = mine.predict(X, batch_size=7, verbose=0)
    results = mine.evaluate(X, Y, batch_size=7, verbose=0)
    with Strategy():
        for size in (1, 7, 64):
            np.testing.assert_allclose(
                mine.predict(X, batch_size=size, verbose=0), outputs, atol=2e-6
            )
        np.testing.assert_allclose(
            mine.evaluate(X, Y, batch_size=7, verbose=0), results, rtol=2e-6
        )
        np.testing.assert_allclose(
            mine.predict_on_batch(X[:9]), outputs[:9], atol=2e-6
        )


@check
def single_batches():
    mine, reference = model(), model()
    with Strategy():
        for start in range(0, COUNT, 9):
            batch = X[start : start + 9], Y[start : start + 9]
            logs = mine.train_on_batch(*batch, return_dict=True)
            wanted = reference.train_on_batch(*batch, return_dict=True)
            for name, value in wanted.items():
                np.testing.assert_allclose(logs[name], value, rtol=1e-5)
    assert_same_model(mine, reference)


@check
def statistics_are_averaged():
    def build():
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        built = keras.Sequential(
            [
                keras.layers.Input((4,)),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(3),
            ]
        )
        built.compile("sgd", "mse")
        return built

    mine = build()
    with Strategy():
        mine.fit(X, Y, batch_size=10, shuffle=False, verbose=0)
        mine.train_on_batch(X[:10], Y[:10])
    assert_same_model(mine)
    assert_equal_on_ranks([v.numpy().tolist() for v in mine.variables])
    # Rows 0-4 and 5-9 of every ten, on ranks 0 and 1.
    means = [0.0, 0.0]
    for start in [*range(0, COUNT, 10), 0]:
        for rank in (0, 1):
            rows = X[start + 5 * rank : start + 5 * rank + 5]
            means[rank] = means[rank] * 0.5 + rows.mean(0) * 0.5
    np.testing.assert_allclose(
        mine.layers[0].moving_mean.numpy(), np.mean(means, 0), atol=1e-6
    )


def joined_batches(lengths, size=8):
    """The global batches of ranks that read their own first examples."""
    for start in range(0, max(lengths), size):
        yield tuple(
            np.concatenate(
                [a[start : min(start + size, n)] for n in lengths if start < n]
            )
            for a in (X, Y)
        )


def _joined_dataset():
    return tf.data.Dataset.from_generator(
        lambda: joined_batches((COUNT, SHORT)), output_signature=SPEC
    )


@check
def own_data_of_unequal_length():
    mine, count = model(seed=RANK), (COUNT, SHORT)[RANK]
    own = X[:count], Y[:count]
    options = {"epochs": 2, "shuffle": False, "verbose": 0}
    with Strategy(batches="each"):
        history = mine.fit(*own, batch_size=8, validation_data=own, **options)
        outputs = mine.predict(own[0], verbose=0)
    assert len(outputs) == count
    reference = model()
    both = np.concatenate([X, X[:SHORT]]), np.concatenate([Y, Y[:SHORT]])
    expected = reference.fit(_joined_dataset(), validation_data=both, **options)
    assert_same_model(mine, reference)
    assert_same_history(history, expected)


@check
def own_data_of_unknown_length():
    count = (COUNT, SHORT)[RANK]

    def batches():
        for start in range(0, count, 8):
            yield (
                X[start : min(start + 8, count)],
                Y[start : min(start + 8, count)],
            )

    data = tf.data.Dataset.from_generator(batches, output_signature=SPEC)
    reference = model()
    expected = reference.fit(_joined_dataset(), epochs=2, verbose=0)
    for steps in (1, 3):
        mine = model(seed=RANK, steps_per_execution=steps)
        with Strategy(batches="each"):
            history = mine.fit(data, epochs=2, verbose=0)
        assert_same_model(mine, reference)
        assert_same_history(history, expected)
        assert int(mine.optimizer.iterations) == 14
    mine, reference = model(seed=RANK), model()
    with Strategy(batches="each"):
        history = mine.fit(batches(), verbose=0)
    assert_same_history(history, reference.fit(_joined_dataset(), verbose=0))
    assert_same_model(mine, reference)
    with Strategy(batches="each"):
        mine.fit(data.repeat(), epochs=2, steps_per_epoch=5, verbose=0)
    assert int(mine.optimizer.iterations) == 17


@check
def other_models_are_refused():
    mine = model(outputs=3 + RANK)
    mine.compile("sgd", keras.losses.cosine_similarity)
    with (
        refused("rank 1", "dense_1/kernel [8, 3]", "dense_1/kernel [8, 4]"),
        Strategy(),
    ):
        mine.fit(X, np.zeros((COUNT, 1)), verbose=0)
    assert mine.distribute_strategy is None or not tf.distribute.has_strategy()


@check
def ranks_that_drift_are_equal_at_the_end_of_an_epoch():
    class Drift(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == 1 and batch == 6:
                weight = self.model.trainable_variables[0]
                weight.assign(weight + 1.0)

    for sync in (True, False):
        mine = model()
        with Strategy(sync_every_epoch=sync):
            mine.fit(X, Y, batch_size=8, verbose=0, callbacks=[Drift()])
        first, other = gather(mine.get_weights()[0].tobytes())
        assert (first == other) == sync


@check
def a_model_more_on_rank_0_does_no_harm():
    keras.backend.clear_session()
    if RANK == 0:
        keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(3)])
    mine = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(3)]
    )
    mine.compile("adam", "mse")
    with Strategy():
        mine.fit(X, Y, verbose=0)
    assert_same_model(mine)


@check
def other_gradients_are_refused():
    class Branches(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = keras.layers.Dense(3, name="a")
            self.b = keras.layers.Dense(3, name="b")

        def call(self, x):
            b = self.b(x)
            return self.a(x) + (tf.stop_gradient(b) if RANK else b)

    for eager in (False, True):
        mine = Branches()
        mine.compile("sgd", "mse", run_eagerly=eager)
        strategy = Strategy()
        with refused("Only on rank 0", "b/kernel"), strategy:
            mine.fit(X, Y, verbose=0)
    mine = model()
    with strategy:
        mine.fit(X, Y, verbose=0)
    assert_same_model(mine)


@check
def other_data_is_refused():
    count = (COUNT, SHORT)[RANK]
    mine = model()
    with refused("rank 0 7", "rank 1 3", "each"), Strategy():
        mine.fit(X[:count], Y[:count], batch_size=8, verbose=0)


class Count(keras.callbacks.Callback):
    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


@check
def files_are_written_by_one():
    mine, chief, every = model(), Count(), Count()
    own_log = keras.callbacks.CSVLogger(FOLDER / f"log-{RANK}.csv")
    shared = FOLDER / f"seen-by-{RANK}"
    shared.mkdir()
    with Strategy() as strategy:
        mine.fit(
            X,
            Y,
            epochs=2,
            verbose=0,
            callbacks=[
                keras.callbacks.ModelCheckpoint(shared / "model.keras"),
                keras.callbacks.CSVLogger(shared / "log.csv"),
                keras.callbacks.TensorBoard(shared / "board"),
                keras.callbacks.BackupAndRestore(
                    shared / "backup", delete_checkpoint=False
                ),
                kt.ChiefOnly(chief),
                every,
                kt.EveryRank(own_log),
            ],
        )
    written = sorted(path.name for path in shared.iterdir())
    wanted = ["backup", "board", "log.csv", "model.keras"]
    assert written == ([] if RANK else wanted), written
    assert (chief.epochs, every.epochs) == (0 if RANK else 2, 2)
    assert (FOLDER / f"log-{RANK}.csv").read_text().count("\n") == 3
    strategy._config.transport.gather_objects("all have written")
    saved = keras.models.load_model(FOLDER / "seen-by-0" / "model.keras")
    for a, b in zip(saved.get_weights(), mine.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@check
def stopping_one_stops_all():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if RANK == 1 and epoch == 1:
                self.model.stop_training = True

    mine = model()
    with Strategy():
        history = mine.fit(X, Y, epochs=5, verbose=0, callbacks=[Stop()])
    assert history.epoch == [0, 1]


@check
def rank_0_restores_for_all():
    class Fail(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("power cut")

    backup = FOLDER / "restored"
    mine = model()
    keep = keras.callbacks.BackupAndRestore(backup)
    options = {"shuffle": False, "verbose": 0, "epochs": 4}
    try:
        with Strategy():
            mine.fit(X, Y, callbacks=[keep, Fail()], **options)
    except RuntimeError:
        pass
    again = model(seed=1 + RANK)
    keep = keras.callbacks.BackupAndRestore(backup)
    with Strategy():
        history = again.fit(X, Y, callbacks=[keep], **options)
    assert history.epoch == [2, 3]
    reference = model()
    reference.fit(X, Y, **options)
    assert_same_model(again, reference)


@check
def own_loop():
    def build():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Input((4,)), keras.layers.Dense(3)]
        return keras.Sequential(layers), keras.optimizers.Adam(0.01)

    strategy = Strategy()
    with strategy.scope():
        mine, optimizer = build()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(10)

    def gradients(built, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((built(x) - y) ** 2) / 10.0
        return loss, tape.gradient(loss, built.trainable_variables)

    @tf.function
    def step(batch):
        def replica(x, y):
            loss, grads = gradients(mine, x, y)
            optimizer.apply(grads, mine.trainable_variables)
            return loss

        losses = strategy.run(replica, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    shards = strategy.experimental_distribute_dataset(data)
    losses = [float(step(batch)) for batch in shards]
    reference, optimizer = build()
    for (x, y), loss in zip(data, losses, strict=True):
        wanted, grads = gradients(reference, x, y)
        optimizer.apply(grads, reference.trainable_variables)
        np.testing.assert_allclose(loss, float(wanted), rtol=1e-5)
    assert_same_model(mine, reference)
    rows = tf.constant([[float(RANK)]])
    gathered = strategy.gather(strategy.run(lambda: rows), axis=0)
    assert gathered.numpy().ravel().tolist() == [0.0, 1.0]
    mean = strategy.reduce("MEAN", strategy.run(lambda: rows), axis=None)
    assert float(tf.squeeze(mean)) == 0.5
    numbers = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensors(context.input_pipeline_id)
    )
    assert [int(n) for n in numbers] == [RANK]
