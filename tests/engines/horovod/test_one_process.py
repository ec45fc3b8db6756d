"""``keras_towers.horovod`` without a launcher: one process, nothing sent."""

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import TowerError, horovod as hvd
from keras_towers.engines.dropin.gradient_reducer import reducer_of
from tests.kit.compare import assert_all_close, assert_close

pytestmark = pytest.mark.alternate

OF_KERAS_2 = {"experimental_run_tf_function": False}
SGD = keras.optimizers.SGD
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X[:, :2] ** 2


@pytest.fixture(scope="module", autouse=True)
def initialized():
    hvd.init()
    yield
    hvd.shutdown()


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def trained(optimizer, made=None, run_eagerly=True, **kwargs):
    made = made or model()
    loss = keras.losses.MeanSquaredError()
    made.compile(optimizer, loss, run_eagerly=run_eagerly)
    made.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **kwargs)
    return made


def test_trains_as_one_process():
    plain = trained(keras.optimizers.Adam(0.1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
    ours = trained(optimizer, run_eagerly=False)
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
    assert_all_close(ours.weights, plain.weights)


def test_the_optimizer_itself_is_returned_with_its_class_and_state():
    optimizer = SGD(0.1, momentum=0.9, name="mine")
    made = trained(optimizer)
    config = keras.saving.serialize_keras_object(optimizer)
    before = [variable.numpy() for variable in optimizer.variables]
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, SGD)
    assert not isinstance(optimizer, keras.optimizers.Adam)
    assert keras.saving.serialize_keras_object(optimizer) == config
    assert_all_close(before, optimizer.variables, 0)
    trained(optimizer, made)
    assert int(optimizer.iterations) == 8


class OwnOptimizer(SGD):
    pass


@pytest.mark.parametrize(
    ("suffix", "cls"), [("keras", OwnOptimizer), ("h5", keras.optimizers.Adam)]
)
def test_a_file_does_not_need_this_package(tmp_path, cls, suffix):
    # Backward passes leave no trace in it.
    optimizer = hvd.DistributedOptimizer(cls(0.1), backward_passes_per_step=3)
    ours = trained(optimizer)
    assert int(optimizer.iterations) == 1
    path = tmp_path / f"model.{suffix}"
    ours.save(path)
    plain = keras.models.load_model(path, {cls.__name__: cls})
    assert type(plain.optimizer) is cls
    assert reducer_of(plain.optimizer) is None
    loaded = hvd.load_model(
        path, custom_optimizers=[cls], compression=hvd.Compression.fp16
    )
    reducer = reducer_of(loaded.optimizer)
    assert reducer.options.compression is hvd.Compression.fp16
    assert_all_close(optimizer.variables, loaded.optimizer.variables, 0)
    loaded.fit(X, Y, verbose=0)


def test_a_layer_and_a_model_without_optimizer_are_loaded(tmp_path):
    config = keras.saving.serialize_keras_object(hvd.SyncBatchNormalization())
    loaded = keras.saving.deserialize_keras_object(config)
    assert isinstance(loaded, hvd.SyncBatchNormalization)
    model().save(tmp_path / "model.keras")
    assert not hvd.load_model(tmp_path / "model.keras").compiled


@pytest.mark.parametrize("end", [hvd.shutdown, horovod.tensorflow.shutdown])
def test_compile_is_keras_s_own_after_shutdown(end):
    optimizer = hvd.DistributedOptimizer(SGD(0.1))
    end()
    try:
        made = model()
        with pytest.raises(TypeError, match="experimental_run_tf_function"):
            made.compile(optimizer, **OF_KERAS_2)
        with pytest.raises(TowerError, match=r"call hvd\.init\(\)"):
            hvd.DistributedOptimizer(SGD(0.1))
    finally:
        hvd.init()
    made.compile(optimizer, **OF_KERAS_2)
    with pytest.raises(TypeError, match="experimental_run_tf_function"):
        made.compile("sgd", **OF_KERAS_2)


def test_fit_is_wrapped_and_unwrapped_as_often_as_it_is_begun():
    fit = keras.Model.fit
    for _ in range(2):
        hvd.shutdown()
        hvd.init()
    assert keras.Model.fit is fit


def test_auto_jit_is_off_only_for_a_distributed_optimizer(monkeypatch):
    # What Keras does on a machine with GPUs: XLA where nothing is said.
    trainer = keras.Model.__mro__[2]
    monkeypatch.setattr(
        trainer, "_resolve_auto_jit_compile", lambda model: True
    )
    plain, ours = model(), model()
    plain.compile("sgd", "mse")
    ours.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse")
    assert (plain.jit_compile, ours.jit_compile) == (True, False)


def test_a_loss_scale_that_compile_adds_goes_outside():
    keras.config.set_dtype_policy("mixed_float16")
    made = model()
    optimizer = hvd.DistributedOptimizer(SGD(0.1))
    made.compile(optimizer)
    assert isinstance(made.optimizer, keras.optimizers.LossScaleOptimizer)
    assert reducer_of(made.optimizer) is not None
    assert reducer_of(optimizer) is None


RATES = hvd.callbacks.LearningRateScheduleCallback
WARM_UP = hvd.callbacks.LearningRateWarmupCallback
BROADCAST = hvd.callbacks.BroadcastGlobalVariablesCallback
PARTIAL = hvd.PartialDistributedOptimizer
BEFORE = {"gradient_predivide_factor": 2.0}
DECAY = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)


def _begin(callback, rate=0.1):
    """Begin with a callback where the number of steps is not known."""
    made = model()
    made.compile(SGD(rate))
    callback.set_model(made)
    callback.set_params({"steps": None})
    callback.on_train_begin()


def _distributed(**options):
    return lambda: hvd.DistributedOptimizer(
        **{"optimizer": SGD(0.1), **options}
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_distributed(optimizer="sgd"), "takes an optimizer of Keras 3"),
        (_distributed(op=hvd.Min), r"give hvd\.Average, hvd\.Sum"),
        (_distributed(op="average"), r"give hvd\.Average, hvd\.Sum"),
        (_distributed(compression="fp16"), "no methods compress"),
        (_distributed(backward_passes_per_step=0), "give 1 or more"),
        (_distributed(groups="all"), "a number of groups"),
        (_distributed(op=hvd.Sum, **BEFORE), "applies only to averages"),
        (_distributed(gradient_predivide_factor=0.0), "greater than 0"),
        (lambda: PARTIAL(SGD(), local_layers="all"), "local_layers"),
        (lambda: hvd.broadcast_global_variables(0), "broadcast_variables"),
        (lambda: BROADCAST(0, local_variables="w"), "local_variables"),
        (lambda: _begin(RATES(0.1, 0.5), DECAY), "the optimizer with a number"),
        (lambda: _begin(WARM_UP(0.1)), "steps_per_epoch"),
        (lambda: hvd.SyncBatchNormalization(fused=True), "no fused form"),
        (lambda: hvd.elastic.KerasState(model()), "have an optimizer before"),
    ],
)
def test_wrong_arguments_are_refused(call, words):
    with pytest.raises(TowerError, match=words):
        call()


def test_an_infinite_gradient_does_not_affect_the_next_update():
    variable = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(SGD(0.5), backward_passes_per_step=2)
    for grad in (np.inf, 1.0):
        optimizer.apply([tf.constant([grad])], [variable])
    assert not np.isfinite(variable.numpy())
    variable.assign([1.0])
    for grad in (1.0, 2.0):
        optimizer.apply([tf.constant([grad])], [variable])
    assert_close(variable, [-0.5])


def test_a_pass_without_a_gradient_keeps_those_of_earlier_passes():
    used, unused = keras.Variable([1.0]), keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(SGD(1.0), backward_passes_per_step=2)
    for grad in (tf.constant([0.25]), None, tf.constant([0.5]), None):
        optimizer.apply([tf.constant([0.5]), grad], [used, unused])
    assert_close(used, [-1.0])
    assert_close(unused, [0.25])


def test_an_optimizer_is_distributed_once_and_outside_of_strategies():
    optimizer = hvd.DistributedOptimizer(SGD(0.1))
    with pytest.raises(TowerError, match="already distributed"):
        hvd.DistributedOptimizer(optimizer)
    with kt.TowerStrategy(2):
        with pytest.raises(TowerError, match=r"TowerStrategy\. Use only one"):
            hvd.DistributedOptimizer(SGD(0.1))
        with pytest.raises(TowerError, match="Use only one"):
            trained(optimizer)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"multiplier": 0.5}, [0.4, 0.2, 0.1, 0.05]),
        ({"multiplier": 0.5, "start_epoch": 2}, [0.3, 0.3, 0.4, 0.2]),
        ({"multiplier": lambda epoch: epoch + 1}, [0.4, 0.8, 1.2, 1.6]),
        ({"multiplier": lambda epoch: 2.0, "end_epoch": 1}, [0.8] * 4),
        ({"multiplier": float, "staircase": False}, [0.3, 0.7, 1.1, 1.5]),
    ],
)
def test_learning_rates_follow_the_multiplier(options, expected):
    optimizer = hvd.DistributedOptimizer(SGD(0.3))
    made = trained(optimizer, epochs=4, callbacks=[RATES(0.4, **options)])
    assert made.history.history["lr"] == pytest.approx(expected)


def test_the_best_model_is_kept(tmp_path):
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    assert callback.save_best_only
    callback.filepath = str(tmp_path / "best.keras")
    trained(SGD(0.01), callbacks=[callback])
    assert (tmp_path / "best.keras").exists()


def test_an_elastic_script_goes_on_from_the_last_commit(starts_again):
    places = []
    with pytest.raises(hvd.elastic.HorovodInternalError):
        train_elastically(places)
    starts_again()
    state = train_elastically(places)
    # The last commit before the loss is after batch 7.
    assert places == [*range(1, 9), *range(8, 13)]
    assert (state.epoch, state.batch) == (3, 0)


def train_elastically(places):
    made, optimizer = model(), hvd.DistributedOptimizer(SGD(0.1))
    made.compile(optimizer, "mse", run_eagerly=True)
    state = hvd.elastic.KerasState(made, batch=0, epoch=0)

    class Log(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            # The weights match the epoch and batch, also after going back.
            places.append(4 * state.epoch + state.batch)
            assert int(optimizer.iterations) == places[-1]
            if len(places) == 8:
                raise hvd.elastic.HorovodInternalError("a rank is lost")

    @hvd.elastic.run
    def train(state):
        callbacks = [
            hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Log(),
        ]
        left = 3 - state.epoch
        made.fit(X, Y, 8, epochs=left, callbacks=callbacks, verbose=0)

    train(state)
    return state
