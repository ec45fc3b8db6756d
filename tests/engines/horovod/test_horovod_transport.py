"""What is said where Horovod cannot be used."""

import importlib
import sys

import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.engines.horovod import horovod_transport

SYMBOL = "mpi_lib.so: undefined symbol: _ZN10tensorflow"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ModuleNotFoundError("No module", name="horovod"),
            ["not installed in this environment"],
        ),
        (
            tf.errors.NotFoundError(None, None, SYMBOL),
            [tf.__version__, "another version", "_ZN10"],
        ),
        # Horovod itself is there.
        (ModuleNotFoundError("No module named 'yaml'", name="yaml"), []),
    ],
)
def test_what_does_not_import(error, said, monkeypatch):
    original = importlib.import_module

    def patched(name, *args):
        if name == "horovod.tensorflow":
            raise error
        return original(name, *args)

    monkeypatch.setattr(importlib, "import_module", patched)
    with pytest.raises(TowerError if said else type(error)) as raised:
        horovod_transport.load()
    for part in (*said, "`keras-towers install horovod`") if said else ["yaml"]:
        assert part in str(raised.value)


def test_a_file_that_hides_horovod_is_named(tmp_path, monkeypatch):
    """Importing it would run the script again."""
    path = tmp_path / "horovod.py"
    path.write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    with pytest.raises(TowerError, match=f"hidden by {path}, .*: rename"):
        horovod_transport.load()
