"""What is said where Horovod cannot be used."""

import importlib

import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.transport import horovod


@pytest.fixture
def importing(monkeypatch):
    """Let the import of Horovod end in an error."""

    def fail_with(error):
        original = importlib.import_module

        def patched(name, *args, **kwargs):
            if name == "horovod.tensorflow":
                raise error
            return original(name, *args, **kwargs)

        monkeypatch.setattr(importlib, "import_module", patched)

    return fail_with


def test_missing(importing):
    importing(ModuleNotFoundError("No module named 'horovod'", name="horovod"))
    with pytest.raises(TowerError, match="`keras-towers install horovod`"):
        horovod.load()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("mpi_lib.so: undefined symbol: _ZN10tensorflow"),
        tf.errors.NotFoundError(
            None, None, "undefined symbol: _ZN10tensorflow"
        ),
    ],
)
def test_built_for_another_tensorflow(importing, error):
    importing(error)
    with pytest.raises(TowerError) as raised:
        horovod.load()
    for part in (tf.__version__, "another version", "install horovod", "_ZN10"):
        assert part in str(raised.value)


def test_a_package_that_horovod_needs_is_not_taken_for_horovod(importing):
    importing(ModuleNotFoundError("No module named 'yaml'", name="yaml"))
    with pytest.raises(ModuleNotFoundError, match="yaml"):
        horovod.load()


@pytest.mark.parametrize("name", ["HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"])
def test_a_launcher_is_known_by_what_it_sets(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    assert horovod.was_launched()
    monkeypatch.delenv(name)
    assert not horovod.was_launched()
