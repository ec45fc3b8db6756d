"""What is patched in Keras is restored, and affects nothing else."""

import contextlib
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import distribution
from keras_towers.fit import contract
from tests.exactness import models as m
from tests.kit.compare import assert_exact, close, same_history, same_model
from tests.kit.ordinary import Originals, assert_ordinary
from tests.kit.training import X, Y, adam, classifier, fit


def _everything_in_keras(inside=None) -> dict:
    """Every attribute of every module and class of Keras, by name."""
    found, seen = {}, inside or _inside
    for name, module in list(sys.modules.items()):
        if name.startswith("keras.src") and module is not None:
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if isinstance(value, type) and "keras" in value.__module__:
                    for attribute, item in list(vars(value).items()):
                        # Python adds these when they are first asked for.
                        if attribute not in ("_abc_impl", "__annotations__"):
                            found[name, key, attribute] = seen(item)
    return found


def _inside(item):
    """A function, or what a decorated or wrapped one keeps in its place."""
    if hasattr(item, "__keras_towers__"):
        return item
    wrapped = getattr(item, "__wrapped__", None)
    for cell in getattr(item, "__closure__", None) or ():
        if wrapped in (
            cell.cell_contents,
            getattr(cell.cell_contents, "__wrapped__", None),
        ):
            return _inside(cell.cell_contents)
    return item


def _in_decorator(item):
    """As ``_inside``, but not inside what we wrapped."""
    outer = "__keras_towers_outer__" in getattr(item, "__dict__", {})
    inner = getattr(item, "__wrapped__", None)
    is_decorated = not outer and any(
        cell.cell_contents is inner
        for cell in getattr(item, "__closure__", None) or ()
    )
    return inner if is_decorated else item


def _changed(before: dict, inside=None) -> set:
    now = _everything_in_keras(inside)
    missing = object()
    return {
        key
        for key in before.keys() | now.keys()
        if before.get(key, missing) is not now.get(key, missing)
    }


# Every name of Keras that is replaced, with the modules that define it.
TRAINER = "keras.src.backend.tensorflow.trainer"
OPTIMIZERS = "keras.src.optimizers"
PREPROCESSING = "keras.src.layers.preprocessing"
BATCH_NORM = "keras.src.layers.normalization.batch_normalization"
METRICS = "keras.src.metrics.reduction_metrics"
REPLACED = {
    (TRAINER, "TensorFlowTrainer", "__init__"),
    (TRAINER, "TensorFlowTrainer", "fit"),
    (TRAINER, "TensorFlowTrainer", "evaluate"),
    (TRAINER, "TensorFlowTrainer", "predict"),
    (TRAINER, "TensorFlowTrainer", "train_on_batch"),
    (TRAINER, "TensorFlowTrainer", "test_on_batch"),
    (TRAINER, "TensorFlowTrainer", "predict_on_batch"),
    (TRAINER, "TensorFlowTrainer", "distribute_strategy"),
    ("keras.src.trainers.trainer", "Trainer", "_resolve_auto_jit_compile"),
    (TRAINER, "TFEpochIterator"),
    ("keras.src.backend.tensorflow.core", "Variable", "_initialize"),
    ("keras.src.backend.tensorflow.core", "Variable", "_direct_assign"),
    ("keras.src.random.seed_generator", "SeedGenerator", "next"),
    ("keras.src.random.seed_generator", "global_seed_generator"),
    (f"{OPTIMIZERS}.base_optimizer", "BaseOptimizer", "__init__"),
    (f"{OPTIMIZERS}.base_optimizer", "BaseOptimizer", "apply"),
    (f"{OPTIMIZERS}.loss_scale_optimizer", "LossScaleOptimizer", "apply"),
    (f"{OPTIMIZERS}.multi_optimizer", "MultiOptimizer", "apply"),
    ("keras.src.losses.loss", "reduce_values"),
    ("keras.src.losses.loss", "apply_mask"),
    ("keras.src.losses.losses", "LossFunctionWrapper", "call"),
    (
        f"{PREPROCESSING}.image_preprocessing.base_image_preprocessing_layer",
        "BaseImagePreprocessingLayer",
        "call",
    ),
    (f"{PREPROCESSING}.text_vectorization", "TextVectorization", "call"),
    (BATCH_NORM, "BatchNormalization", "_moments"),
    (METRICS, "Mean", "update_state"),
    (METRICS, "Sum", "update_state"),
    ("keras.src.backend.tensorflow.random", "shuffle"),
}
# Of TensorFlow: the operations that random numbers come from.
OPERATIONS = {
    "tensorflow.python.ops.gen_stateless_random_ops_v2": {
        "stateless_random_uniform_v2",
        "stateless_random_normal_v2",
        "stateless_truncated_normal_v2",
        "stateless_random_uniform_int_v2",
        "stateless_random_uniform_full_int_v2",
        "stateless_random_gamma_v3",
        "stateless_shuffle",
    },
    "tensorflow.python.ops.gen_stateless_random_ops": {
        "stateless_random_poisson",
        "stateless_random_binomial",
        "stateless_multinomial",
        "stateless_parameterized_truncated_normal",
    },
    "tensorflow.python.ops.gen_random_ops": {
        "random_uniform",
        "random_standard_normal",
        "truncated_normal",
        "random_uniform_int",
        "random_gamma",
        "random_poisson_v2",
        "multinomial",
        "parameterized_truncated_normal",
        "random_shuffle",
    },
}


def _defined_in(names: set) -> set:
    """Names without those under which other modules know the same."""
    return {
        (module, *rest)
        for module, *rest in names
        if len(rest) == 1
        or (module, rest[0]) not in names
        and getattr(sys.modules[module], rest[0]).__module__ == module
    }


class Boom(BaseException):
    pass


@pytest.mark.core
@pytest.mark.parametrize("way", ["end", "error", "scope", "nested", "fit"])
def test_everything_in_keras_is_put_back(way):
    model = classifier()
    fit(model)  # imports what Keras imports late
    before = _everything_in_keras()
    inside = set()
    with contextlib.suppress(Boom):
        strategy = kt.TowerStrategy(2)
        with strategy.scope() if way == "scope" else strategy:
            inside = _changed(before)
            if way == "error":
                raise Boom
            if way == "nested":
                with strategy.scope():
                    pass
                # Patched until the last scope is left.
                assert _changed(before) == inside
            if way == "fit":

                def stop(batch, logs):
                    raise Boom

                note = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
                fit(model, callbacks=[note])
    # Any metric's result may be a log.
    results = {name for name in before if name[2:] == ("result",)}
    assert _defined_in(inside - results) == {
        name for name in REPLACED if name in before
    }
    assert not _changed(before)


# What stays replaced, so that keras.distribution trains on towers.
BACKEND = "keras.src.backend.tensorflow.distribution_lib"
CONNECTED = {
    *((TRAINER, "TensorFlowTrainer", name) for name in contract.METHODS),
    ("keras.src.backend.common.global_state", "set_global_attribute"),
    ("keras.src.utils.traceback_utils", "include_frame"),
    (BACKEND, "get_device_count"),
    (BACKEND, "initialize"),
    (BACKEND, "list_devices"),
    (BACKEND, "num_processes"),
    (BACKEND, "process_id"),
}


def test_what_keras_distribution_needs_is_put_back():
    distribution.disconnect()
    try:
        before = _everything_in_keras(_in_decorator)
        distribution.connect()
        inside = _changed(before, _in_decorator)
        distribution.disconnect()
        assert not _changed(before, _in_decorator)
    finally:
        distribution.connect()
    assert _defined_in(inside) == CONNECTED


def _operations() -> dict:
    found = {
        (module, name): value
        for module in OPERATIONS
        for name, value in vars(sys.modules[module]).items()
    }
    found["Generator"] = tf.random.Generator._prepare_key_counter
    return found


def test_operations_of_tensorflow_are_put_back():
    before = _operations()
    with kt.TowerStrategy(2):
        inside = _operations()
    assert {key for key in before if inside[key] is not before[key]} == {
        "Generator",
        *((module, n) for module, names in OPERATIONS.items() for n in names),
    }
    assert _operations() == before


def test_refused_strategy_leaves_nothing_patched():
    before = _everything_in_keras()
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with stock.scope(), pytest.raises(kt.TowerError):
        kt.TowerStrategy(2).__enter__()
    assert not _changed(before)


def _plain():
    model = classifier()
    history = fit(model)
    return history, model


def _stock():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = classifier()
    return fit(model, x=X[:32], y=Y[:32]), model


@pytest.mark.parametrize("other", [_plain, _stock])
def test_other_training_is_unchanged_before_and_after(other):
    """What runs without towers is Keras's own code.

    Two traces of it may add the same numbers in another order.
    """
    history, model = other()
    with kt.TowerStrategy(3):
        fit(classifier())
    again, later = other()
    same_history(again, history)
    for mine, wanted in zip(later.weights, model.weights, strict=True):
        close(mine.numpy(), wanted.numpy())


def test_another_thread_trains_as_plain_keras():
    """The patches are in force for the whole process, the strategy is not."""
    wanted, reference = _plain()
    model, results, errors = classifier(), [], []

    def work():
        try:
            results.append(
                (
                    fit(model),
                    tf.distribute.has_strategy(),
                    model.distribute_strategy,
                )
            )
        except BaseException as error:
            errors.append(error)

    on_towers = classifier()
    thread = threading.Thread(target=work)
    with kt.TowerStrategy(3):
        thread.start()
        # Keras may not be traced by two threads at a time.
        thread.join(60)
        fit(on_towers)
    assert not errors
    ((history, has_strategy, strategy),) = results
    same_history(history, wanted)
    assert not has_strategy
    assert strategy is tf.distribute.get_strategy()
    assert_ordinary(model)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy())
    same_model(on_towers, reference)


def test_another_thread_steps_while_towers_step():
    """Both are traced, then run at the same time; the block is left first."""
    reference = classifier()
    fit(reference, epochs=30)
    model, on_towers = classifier(), classifier()
    going, patched = threading.Event(), threading.Event()

    def wait(epoch, logs):
        if epoch == 0:
            going.set()
            patched.wait(60)

    note = keras.callbacks.LambdaCallback(on_epoch_end=wait)
    thread = threading.Thread(
        target=lambda: fit(model, epochs=30, callbacks=[note])
    )
    thread.start()
    assert going.wait(60)
    with kt.TowerStrategy(3):
        fit(on_towers)
        patched.set()
        fit(on_towers, epochs=3)
    thread.join(60)
    assert not thread.is_alive()
    assert_ordinary(model)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy())


@pytest.mark.parametrize(
    "options",
    [{"jit_compile": True}, {"jit_compile": "auto"}, {"run_eagerly": True}],
    ids=str,
)
def test_how_a_model_was_compiled_is_restored(options):
    plain, model = classifier(**options), classifier(**options)
    with kt.TowerStrategy(3):
        fit(model, x=X[:21], y=Y[:21])
    assert model.jit_compile is plain.jit_compile
    assert model.run_eagerly is plain.run_eagerly
    for name in options:
        config = model.get_compile_config()
        assert config[name] == plain.get_compile_config()[name]
    # XLA compiles it, where that was asked for.
    assert np.isfinite(model.train_on_batch(X[:8], Y[:8])[0])


@pytest.mark.parametrize("after", [True, False])
def test_compiled_anew_inside_is_what_counts_after(after):
    model = classifier(jit_compile=not after)
    with kt.TowerStrategy(3):
        fit(model)
        model.compile(adam(), m.cross_entropy(), jit_compile=after)
        fit(model)
    assert model.jit_compile is after


class OwnApply(keras.optimizers.SGD):
    """The sign of the gradient, which no sum of towers' signs is."""

    def apply(self, grads, trainable_variables=None):
        return super().apply([tf.sign(g) for g in grads], trainable_variables)


class OwnApplyGradients(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients(
            [(tf.sign(grad), variable) for grad, variable in grads_and_vars]
        )


class OwnUpdateStep(keras.optimizers.Optimizer):
    """Its own slots and its own update, as the Keras guide shows."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.seen = self.add_optimizer_variables(variables, "seen")

    def update_step(self, gradient, variable, learning_rate):
        seen = self.seen[self._get_variable_index(variable)]
        rate = tf.cast(learning_rate, variable.dtype)
        self.assign_add(seen, tf.square(gradient))
        self.assign_sub(
            variable, rate * gradient / (tf.sqrt(seen.value) + 1e-3)
        )


@pytest.mark.parametrize(
    "kind, updates",
    [
        (OwnApply, "once"),
        (OwnApplyGradients, "once"),
        (OwnApplyGradients, "each"),
        (OwnUpdateStep, "each"),
    ],
)
def test_own_optimizers(kind, updates):
    assert_exact(
        lambda: classifier(optimizer=lambda: kind(0.01)),
        fit,
        kt.TowerStrategy(3, updates=updates),
    )


def test_own_optimizer_defined_inside():
    """A notebook's cell may define it after the strategy is entered."""
    reference = classifier(optimizer=lambda: OwnApply(0.01))
    wanted = fit(reference)
    model = classifier()
    originals = Originals(model)
    with kt.TowerStrategy(3):

        class Late(keras.optimizers.SGD):
            def apply(self, grads, trainable_variables=None):
                grads = [tf.sign(grad) for grad in grads]
                return super().apply(grads, trainable_variables)

        model.compile(Late(0.01), m.cross_entropy(), metrics=["accuracy"])
        found = fit(model)
    same_history(found, wanted)
    assert_ordinary(model)
    assert originals.held[0][0]._value is originals.held[0][1]
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy())
    # Used as an ordinary class it is as it was written.
    assert Late.apply.__code__.co_name == "apply"
    fit(reference)
    fit(model)
    for mine, other in zip(model.weights, reference.weights, strict=True):
        close(mine.numpy(), other.numpy(), 4e-6)
