"""The errors of an engine that cannot be used."""

import importlib
import sys

import pytest
import tensorflow as tf

from keras_towers import TowerError
from keras_towers.foundation import notices
from keras_towers.jobs import known_engines

pytestmark = pytest.mark.core
SYMBOL = "mpi_lib.so: undefined symbol: _ZN10tensorflow"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package with the engine's name, by what importing it does."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)

    def make(statement):
        folder = tmp_path / "horovod" / "tensorflow"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").write_text(statement)
        monkeypatch.syspath_prepend(tmp_path)

    return make


def test_an_engine_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = "not installed in this environment: run `keras-towers install horo"
    with pytest.raises(TowerError, match=said):
        known_engines.HOROVOD.import_module()


def test_an_engine_that_was_built_for_another_tensorflow(package):
    package(f"raise ImportError({SYMBOL!r})")
    with pytest.raises(TowerError, match="probably built for another") as error:
        known_engines.HOROVOD.import_module()
    for part in (tf.__version__, "`keras-towers install horovod`", "_ZN10"):
        assert part in str(error.value)


def test_a_package_that_the_engine_lacks_is_named(package):
    package("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        known_engines.HOROVOD.import_module()


def test_a_file_that_hides_the_engine_is_named(tmp_path, monkeypatch):
    """Importing it would run the script again."""
    path = tmp_path / "horovod.py"
    path.write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    with pytest.raises(TowerError, match=f"hidden by {path}, .*: rename"):
        known_engines.HOROVOD.import_module()


def test_the_drop_in_is_announced_once_by_rank_0(monkeypatch, caplog):
    caplog.set_level("INFO", "keras_towers")
    for rank in "10":
        monkeypatch.setenv("HOROVOD_RANK", rank)
        monkeypatch.setattr(notices, "_said", {})
        for module in ("byteps.keras", "byteps.tensorflow.keras"):
            known_engines.announce_drop_in(module)
    (line,) = caplog.messages
    assert line.startswith("`import byteps.keras` gives keras_towers.byteps")
