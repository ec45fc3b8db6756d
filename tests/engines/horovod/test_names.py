"""No name of Horovod is missing without a word."""

import importlib
import inspect
import json

import pytest

from keras_towers import horovod as hvd
from keras_towers.engines.horovod.hvd import operations
from tests.kit.scripts import run_python

pytestmark = pytest.mark.alternate

# A module of Horovod, and what is ours in place of it.
PAIRS = {
    "tensorflow": hvd,
    "tensorflow.keras": hvd,
    "keras": hvd,
    "keras.callbacks": hvd.callbacks,
    "tensorflow.keras.callbacks": hvd.callbacks,
    "keras.elastic": hvd.elastic,
    "tensorflow.elastic": hvd.elastic,
    "tensorflow.keras.elastic": hvd.elastic,
}
# What Horovod itself has, where keras_towers is not imported: the public names
# of each module, without what it imports for itself, and their arguments. Then
# keras_towers is imported too late, and training is refused.
OWN = """
import importlib, inspect, json, sys, types

def arguments(value):
    try:
        made = value.__init__ if isinstance(value, type) else value
        return list(inspect.signature(made).parameters)
    except (TypeError, ValueError):
        return []

found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(f"horovod.{name}")
    found[name] = {
        name: arguments(value)
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") != "horovod.common.util"
        and (
            not isinstance(value, types.ModuleType)
            or value.__name__.startswith("horovod")
        )
    }

import keras, numpy as np
import horovod.keras as hvd
hvd.init()
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
inner = hvd.DistributedOptimizer(keras.optimizers.SGD())
model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
import keras_towers as kt
try:
    model.train_on_batch(np.ones((2, 2)), np.ones((2, 1)))
except kt.TowerError as error:
    print(json.dumps([found, str(error)]))
"""


@pytest.fixture(scope="module")
def own():
    """The names that Horovod has, and an error."""
    done = run_python("-c", OWN, *PAIRS)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


# Horovod's own modules and helpers, which scripts do not use.
INTERNAL = {
    *("broadcast_object_fn", "compression", "gradient_aggregation"),
    *("gradient_aggregation_eager", "keras", "mpi_ops", "run_fn", "util"),
}

ELASTIC = (
    *("KerasState", "CommitStateCallback"),
    *("UpdateBatchStateCallback", "UpdateEpochStateCallback"),
)


@pytest.mark.parametrize("module", PAIRS)
def test_every_name_is_there(module, own):
    theirs, ours = own[0][module], PAIRS[module]
    assert theirs
    for name in theirs:
        assert name in INTERNAL or getattr(ours, name) is not None
    # Under its own name, Horovod's modules for tensors stay Horovod's.
    imported = importlib.import_module(f"horovod.{module}")
    assert (imported is ours) == ("keras" in module)


def test_a_script_that_another_launcher_starts_gets_the_drop_in(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import horovod.keras as hvd\n"
        "import horovod.tensorflow.keras as other\n"
        "import keras_towers as kt\n"
        "print(hvd is kt.horovod, other is kt.horovod)\n"
    )
    done = run_python("-m", "keras_towers", str(script))
    assert done.stdout == "True True\n", done.stderr


def test_horovods_own_optimizer_is_refused(own):
    _, error = own
    assert "exchanges nothing" in error
    assert "Import keras_towers before horovod.keras" in error


def test_arguments_are_in_the_order_of_horovod(own):
    names, _ = own
    for name, arguments in operations.OF_KERAS.items():
        assert arguments.split() == names["keras"][name]
    for name in ELASTIC:
        ours = inspect.signature(getattr(hvd.elastic, name).__init__)
        assert [*ours.parameters] == names["keras.elastic"][name]


def test_names_that_are_missing():
    with pytest.raises(AttributeError, match=r"has no attribute 'bogus'$"):
        _ = hvd.bogus
    with pytest.raises(AttributeError, match="this module itself"):
        _ = hvd.keras


def test_both_forms_of_the_import_find_one_module():
    assert importlib.import_module("keras_towers.horovod") is hvd
    for name in ("callbacks", "elastic"):
        module = importlib.import_module(f"keras_towers.horovod.{name}")
        assert module is getattr(hvd, name)
