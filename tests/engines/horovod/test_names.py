"""No name of Horovod is missing without a word."""

import importlib
import inspect
import types

import horovod.keras.elastic
import pytest

from keras_towers import horovod as hvd

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


def public(module):
    """Names of a module of Horovod, without what it imports for itself."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") == "horovod.common.util":
            continue
        is_module = isinstance(value, types.ModuleType)
        if not name.startswith("_") and (
            not is_module or value.__name__.startswith("horovod")
        ):
            yield name


# Horovod's own modules and helpers, which scripts do not use.
INTERNAL = {
    *("broadcast_object_fn", "compression", "gradient_aggregation"),
    *("gradient_aggregation_eager", "keras", "mpi_ops", "run_fn", "util"),
}


@pytest.mark.parametrize("module", PAIRS)
def test_every_name_is_there(module):
    theirs, ours = importlib.import_module(f"horovod.{module}"), PAIRS[module]
    for name in public(theirs):
        assert name in INTERNAL or getattr(ours, name) is not None


def test_names_that_are_missing():
    with pytest.raises(AttributeError, match=r"has no attribute 'bogus'$"):
        _ = hvd.bogus
    with pytest.raises(AttributeError, match="this module itself"):
        _ = hvd.keras


def test_both_forms_of_the_import_find_one_module():
    assert importlib.import_module("keras_towers.horovod") is hvd
    callbacks = importlib.import_module("keras_towers.horovod.callbacks")
    assert callbacks is hvd.callbacks


@pytest.mark.parametrize(
    "name", sorted({*horovod.keras.elastic.__all__} - {"run"})
)
def test_elastic_arguments_are_in_the_order_of_horovod(name):
    theirs, ours = (
        list(inspect.signature(getattr(module, name).__init__).parameters)
        for module in (horovod.keras.elastic, hvd.elastic)
    )
    assert ours == theirs
