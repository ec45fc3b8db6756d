"""No name of Horovod is missing without a word."""

import inspect
import types

import horovod.keras
import horovod.keras.callbacks
import horovod.keras.elastic
import horovod.tensorflow
import horovod.tensorflow.elastic
import horovod.tensorflow.keras
import pytest

import keras_towers.horovod as hvd
from keras_towers.horovod import other_names

PAIRS = [
    (horovod.tensorflow, hvd),
    (horovod.tensorflow.keras, hvd),
    (horovod.keras, hvd),
    (horovod.keras.callbacks, hvd.callbacks),
    (horovod.tensorflow.keras.callbacks, hvd.callbacks),
    (horovod.keras.elastic, hvd.elastic),
    (horovod.tensorflow.elastic, hvd.elastic),
    (horovod.tensorflow.keras.elastic, hvd.elastic),
]


def public(module):
    """Names of a module of Horovod, without what it imports for itself."""
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") == "horovod.common.util":
            continue
        is_module = isinstance(value, types.ModuleType)
        if not name.startswith("_") and (
            not is_module or value.__name__.startswith("horovod")
        ):
            yield name, value


@pytest.mark.parametrize(
    ("theirs", "ours"), PAIRS, ids=[theirs.__name__ for theirs, _ in PAIRS]
)
def test_every_name_works_or_says_what_to_use(theirs, ours):
    for name, value in public(theirs):
        if name in other_names.INSTEAD:
            with pytest.raises(AttributeError, match="has no attribute .*: "):
                getattr(ours, name)
        else:
            is_module = isinstance(value, types.ModuleType)
            assert is_module or name in ours.__all__
            assert getattr(ours, name) is not None


def test_other_names_are_missing_as_everywhere():
    with pytest.raises(AttributeError, match=r"has no attribute 'bogus'$"):
        _ = hvd.bogus


@pytest.mark.parametrize(
    "name",
    [name for name in horovod.keras.elastic.__all__ if name != "run"],
)
def test_elastic_arguments_are_in_the_order_of_horovod(name):
    theirs, ours = (
        list(inspect.signature(getattr(module, name).__init__).parameters)
        for module in (horovod.keras.elastic, hvd.elastic)
    )
    assert ours == theirs
