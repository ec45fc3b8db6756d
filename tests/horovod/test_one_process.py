"""``keras_towers.horovod`` without a launcher: one process, nothing sent."""

import horovod.tensorflow
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
import keras_towers.horovod as hvd
from keras_towers import TowerError
from keras_towers.dropin import wrapping

# Before hvd.init(), as pytest imports all test files first.
COMPILE = keras.Model.compile


@pytest.fixture(scope="module", autouse=True)
def initialized():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(32, 4)).astype("float32"), rng.normal(size=(32, 2))


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def trained(optimizer, data, made=None, **kwargs):
    made = made or model()
    made.compile(optimizer, keras.losses.MeanSquaredError())
    made.fit(*data, batch_size=8, shuffle=False, verbose=0, **kwargs)
    return made


def test_trains_as_one_process(data):
    plain = trained(keras.optimizers.Adam(0.1), data)
    ours = trained(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), data)
    assert (hvd.rank(), hvd.size(), hvd.local_rank()) == (0, 1, 0)
    for a, b in zip(plain.get_weights(), ours.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_optimizer_itself_is_returned_with_its_class():
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, name="mine")
    before = keras.saving.serialize_keras_object(optimizer)
    assert hvd.DistributedOptimizer(optimizer) is optimizer
    assert isinstance(optimizer, keras.optimizers.SGD)
    assert not isinstance(optimizer, keras.optimizers.Adam)
    assert keras.saving.serialize_keras_object(optimizer) == before


@keras.saving.register_keras_serializable("tests")
class OwnOptimizer(keras.optimizers.SGD):
    pass


@pytest.mark.parametrize("suffix", ["keras", "h5"])
@pytest.mark.parametrize("cls", [keras.optimizers.Adam, OwnOptimizer])
def test_a_file_does_not_need_this_package(data, tmp_path, cls, suffix):
    ours = trained(hvd.DistributedOptimizer(cls(0.1)), data)
    path = tmp_path / f"model.{suffix}"
    ours.save(path)
    plain = keras.models.load_model(path)
    assert type(plain.optimizer) is cls
    assert wrapping.distribution_of(plain.optimizer) is None
    loaded = hvd.load_model(path, compression=hvd.Compression.fp16)
    state = wrapping.distribution_of(loaded.optimizer)
    assert state.reducer.options.compression is hvd.Compression.fp16
    for a, b in zip(
        ours.optimizer.variables, loaded.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(a, b)
    loaded.fit(*data, verbose=0)


def test_a_model_without_optimizer_loads(tmp_path):
    model().save(tmp_path / "model.keras")
    loaded = hvd.load_model(tmp_path / "model.keras")
    assert not loaded.compiled


def test_custom_optimizers_are_found(data, tmp_path):
    class Unregistered(keras.optimizers.SGD):
        pass

    ours = trained(hvd.DistributedOptimizer(Unregistered(0.1)), data)
    ours.save(tmp_path / "model.keras")
    loaded = hvd.load_model(
        tmp_path / "model.keras", custom_optimizers=[Unregistered]
    )
    assert isinstance(loaded.optimizer, Unregistered)


def test_a_trained_optimizer_keeps_its_state(data):
    made = trained(keras.optimizers.SGD(0.1, momentum=0.9), data)
    before = [variable.numpy() for variable in made.optimizer.variables]
    optimizer = hvd.DistributedOptimizer(made.optimizer)
    assert int(optimizer.iterations) == 4
    for a, b in zip(before, optimizer.variables, strict=True):
        np.testing.assert_array_equal(a, b)
    trained(optimizer, data, made)
    assert int(optimizer.iterations) == 8


def test_backward_passes_leave_no_trace_in_the_file(data, tmp_path):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=3
    )
    made = trained(optimizer, data)
    assert int(optimizer.iterations) == 1
    made.save(tmp_path / "model.keras")
    plain = keras.models.load_model(tmp_path / "model.keras")
    assert len(plain.optimizer.variables) == len(optimizer.variables)


def test_the_option_of_keras_2_is_taken_for_ours_only():
    made = model()
    made.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        experimental_run_tf_function=False,
    )
    with pytest.raises(TypeError, match="experimental_run_tf_function"):
        made.compile("sgd", experimental_run_tf_function=False)


@pytest.mark.parametrize("end", [hvd.shutdown, horovod.tensorflow.shutdown])
def test_compile_is_keras_s_own_after_shutdown(end):
    assert keras.Model.compile is not COMPILE
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    end()
    try:
        made = model()
        with pytest.raises(TypeError, match="experimental_run_tf_function"):
            made.compile(optimizer, experimental_run_tf_function=False)
        assert keras.Model.compile is COMPILE
    finally:
        hvd.init()
    made.compile(optimizer, experimental_run_tf_function=False)


def test_a_loss_scale_around_it_is_turned_round_by_compile():
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    outer = keras.optimizers.LossScaleOptimizer(inner)
    variable = keras.Variable([1.0])
    with pytest.raises(TowerError, match="Wrap it the other way"):
        outer.apply([tf.constant([1.0])], [variable])
    made = model()
    made.compile(outer)
    assert wrapping.distribution_of(inner) is None
    assert wrapping.distribution_of(outer) is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": hvd.Min}, "give hvd.Average, hvd.Sum"),
        ({"op": "average"}, "give hvd.Average, hvd.Sum"),
        ({"compression": "fp16"}, "cannot compress"),
        ({"backward_passes_per_step": 0}, "give 1 or more"),
        ({"groups": "all"}, "a number of groups"),
        (
            {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
            "applies only to averages",
        ),
        ({"gradient_predivide_factor": 0.0}, "greater than 0"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(TowerError, match=words):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **options)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TowerError, match="takes an optimizer of Keras 3"):
        hvd.DistributedOptimizer("sgd")


def test_an_optimizer_is_distributed_once():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(TowerError, match="already distributed"):
        hvd.DistributedOptimizer(optimizer)


def test_init_is_needed():
    hvd.shutdown()
    try:
        with pytest.raises(TowerError, match=r"call hvd\.init\(\)"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    finally:
        hvd.init()


def test_a_strategy_in_force_is_refused(data):
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with (
        pytest.raises(TowerError, match="Use only one"),
        kt.TowerStrategy(2),
    ):
        trained(optimizer, data)


def test_a_strategy_that_it_is_made_in_is_refused():
    with (
        kt.TowerStrategy(2),
        pytest.raises(TowerError, match=r"TowerStrategy\. Use only one"),
    ):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))


def test_local_layers_are_layers():
    with pytest.raises(TowerError, match="local_layers"):
        hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers="dense"
        )


def test_global_variables_are_refused_with_what_to_use():
    with pytest.raises(TowerError, match=r"hvd\.broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_schedules_cannot_be_multiplied(data):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(schedule))
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    with pytest.raises(TowerError, match="create the optimizer with a number"):
        trained(optimizer, data, callbacks=[callback])


def test_unknown_number_of_steps_is_asked_for():
    def batches():
        yield np.ones((2, 4)), np.ones((2, 2))

    made = model()
    made.compile(keras.optimizers.SGD(0.1), "mse")
    callback = hvd.callbacks.LearningRateWarmupCallback(0.1)
    with pytest.raises(TowerError, match="steps_per_epoch"):
        made.fit(batches(), callbacks=[callback], verbose=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"multiplier": 0.5}, [0.4, 0.2, 0.1, 0.05]),
        ({"multiplier": 0.5, "start_epoch": 2}, [0.3, 0.3, 0.4, 0.2]),
        ({"multiplier": lambda epoch: epoch + 1}, [0.4, 0.8, 1.2, 1.6]),
        (
            {"multiplier": lambda epoch: 2.0, "end_epoch": 1},
            [0.8, 0.8, 0.8, 0.8],
        ),
        (
            {"multiplier": lambda epoch: epoch, "staircase": False},
            [0.3, 0.7, 1.1, 1.5],
        ),
    ],
)
def test_learning_rates_follow_the_multiplier(data, options, expected):
    callback = hvd.callbacks.LearningRateScheduleCallback(0.4, **options)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.3))
    made = trained(optimizer, data, epochs=4, callbacks=[callback])
    assert made.history.history["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("correct", [False, True])
def test_momentum_is_multiplied_with_the_learning_rate(data, correct, scaled):
    optimizer = keras.optimizers.SGD(0.4, momentum=0.9)
    slots = optimizer
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    made = trained(hvd.DistributedOptimizer(optimizer), data)
    before = slots.momentums[0].numpy()
    callback = hvd.callbacks.LearningRateScheduleCallback(
        0.4, lambda epoch: 0.5, momentum_correction=correct
    )
    callback.set_model(made)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    callback.on_train_batch_begin(0)
    np.testing.assert_allclose(
        slots.momentums[0].numpy(), before * (0.5 if correct else 1)
    )


def test_the_best_model_is_kept(data, tmp_path):
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    assert callback.save_best_only
    callback.filepath = str(tmp_path / "best.keras")
    trained(keras.optimizers.SGD(0.01), data, callbacks=[callback])
    assert (tmp_path / "best.keras").exists()


def test_variables_of_the_callback_are_variables():
    with pytest.raises(TowerError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables="w")
