"""A missing or unsuitable TensorFlow or Keras gives one clear error."""

import importlib
import importlib.util
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import keras_towers as kt
from keras_towers import compat

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "path",
    [
        "keras.src.backend.tensorflow.trainer:Gone",
        "keras.src.backend.gone:TensorFlowTrainer",
        "tensorflow.python.distribute.values:PerReplica.gone",
        "no_such_package.module:Name",
    ],
)
def test_a_name_that_is_gone(path):
    with pytest.raises(kt.CompatibilityError) as error:
        compat.resolve(path)
    message = str(error.value)
    assert path in message
    assert f"{_package('keras')} {keras.__version__}" in message
    assert compat.KNOWN_TO_WORK in message
    assert "install" in message
    assert isinstance(error.value, ImportError)


def _package(module):
    """``keras``, ``keras-nightly``, ..."""
    from importlib import metadata

    return metadata.packages_distributions()[module][0]


def test_a_nested_name():
    resolved = compat.resolve("keras.src.losses.loss:Loss.call")
    assert resolved is keras.losses.Loss.call


def test_a_private_name_is_gone_at_import():
    script = (
        "import keras.src.backend.tensorflow.trainer as trainer\n"
        "del trainer.TFEpochIterator\n"
        "import keras_towers; keras_towers.TowerStrategy\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "CompatibilityError" in last
    assert "trainer:TFEpochIterator" in last
    assert compat.KNOWN_TO_WORK in last


TRAINER = "keras.src.models.model:Trainer"
OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"


@pytest.mark.parametrize(
    "path",
    [
        f"{TRAINER}.fit",
        f"{TRAINER}.predict_on_batch",
        f"{TRAINER}._maybe_symbolic_build",
        f"{TRAINER}._symbolic_build",
        f"{TRAINER}.make_predict_function",
        f"{TRAINER}._get_metrics_result_or_logs",
        f"{OPTIMIZER}.apply",
        f"{OPTIMIZER}.scale_loss",
        f"{OPTIMIZER}.finalize_variable_values",
        "keras.src.backend.tensorflow.trainer:TFEpochIterator",
        "keras.src.losses.loss:reduce_values",
        "keras.src.losses.loss:apply_mask",
        "keras.layers:Layer._flatten_layers",
        "tensorflow.python.distribute.values:PerReplica",
    ],
)
def test_a_name_that_is_patched_is_looked_for_at_import(path, monkeypatch):
    module, _, names = path.partition(":")
    owner = importlib.import_module(module)
    *classes, name = names.split(".")
    for cls in classes:
        owner = getattr(owner, cls)
    for base in getattr(owner, "__mro__", [owner]):
        if name in vars(base):
            monkeypatch.delattr(base, name)
    assert_refused(path)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        (f"{OPTIMIZER}._trainable_variables", f"{OPTIMIZER}.__init__"),
        (
            "keras.optimizers:RMSprop._momentums",
            "keras.optimizers:RMSprop.build",
        ),
    ],
)
def test_a_name_that_only_instances_have(path, method, monkeypatch):
    owner, _, name = method.rpartition(".")
    monkeypatch.setattr(compat.resolve(owner), name, lambda self: None)
    assert_refused(path)


def assert_refused(path):
    # A second copy of the module, so that the real one stays as it is.
    spec = importlib.util.spec_from_file_location("fresh", compat.__file__)
    with pytest.raises(kt.CompatibilityError) as error:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert path in str(error.value)
    assert compat.KNOWN_TO_WORK in str(error.value)


def test_single_device_mode_hides_the_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        with compat.single_device_mode():
            assert not tf.distribute.has_strategy()
            assert tf.distribute.get_replica_context() is not None
            variable = tf.Variable(1.0)
            assert not isinstance(variable, compat.DistributedVariable)
        assert tf.distribute.has_strategy()
        assert isinstance(tf.Variable(1.0), compat.DistributedVariable)


def test_single_device_mode_ends_with_an_error():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        with pytest.raises(KeyError), compat.single_device_mode():
            raise KeyError
        assert tf.distribute.get_strategy() is strategy


def test_single_device_mode_in_a_traced_condition():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    seen = []

    @tf.function
    def traced(flag):
        def branch():
            seen.append(tf.distribute.has_strategy())
            return 1.0

        with compat.single_device_mode():
            return tf.cond(flag, branch, branch)

    with strategy.scope():
        traced(tf.constant(True))
    assert seen == [False, False]
