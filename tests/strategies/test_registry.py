"""Strategies by name."""

import sys

import pytest

import keras_towers as kt
from keras_towers.strategies import registry

pytestmark = pytest.mark.core


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """A package with a strategy of its own."""
    (tmp_path / "lone_package.py").write_text(
        "NUMBER = 7\n"
        "class Lone:\n"
        "    def __init__(self, towers=1):\n"
        "        self.towers = towers\n"
        "class Broken:\n"
        "    def __init__(self):\n"
        "        len(3)\n"
    )
    folder = tmp_path / "lone_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: lone-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[keras_towers.strategies]\n"
        "lone = lone_package:Lone\n"
        "broken = lone_package:Broken\n"
        "tower = lone_package:Lone\n"
        "no-module = lone_package.gone:Lone\n"
        "no-class = lone_package:Gone\n"
        "number = lone_package:NUMBER\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("lone_package", None)


def test_own_strategy_with_options():
    strategy = kt.strategy("tower", towers=2, mode="cpu")
    assert isinstance(strategy, kt.TowerStrategy)
    assert strategy.num_replicas_in_sync == 2


def test_third_party_strategy(third_party):
    assert kt.strategy("lone", towers=3).towers == 3
    assert "lone" in registry.strategy_names()


def test_own_names_cannot_be_taken(third_party):
    assert isinstance(kt.strategy("tower", towers=1), kt.TowerStrategy)


def test_unknown_name_lists_the_known(third_party):
    with pytest.raises(kt.TowerError, match="'nope'; known are .*lone.*tower"):
        kt.strategy("nope")


@pytest.mark.parametrize("name", [["tower"], None, 3, kt.TowerStrategy])
def test_no_name(name):
    with pytest.raises(kt.TowerError, match="not the name .*'noop', .*'tower'"):
        kt.strategy(name)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("no-module", "lone_package.gone:Lone", ModuleNotFoundError),
        ("no-class", "lone_package:Gone", AttributeError),
        ("number", "lone_package:NUMBER", None),
    ],
)
def test_broken_third_party(third_party, name, value, cause):
    with pytest.raises(kt.TowerError) as error:
        kt.strategy(name)
    message = str(error.value)
    for part in (f"'{name}'", "package lone-package", f"'{value}'"):
        assert part in message
    if cause is None:
        assert "is 7, not a class" in message
        assert error.value.__cause__ is None
    else:
        assert isinstance(error.value.__cause__, cause)
        assert f"{cause.__name__}: {error.value.__cause__}" in message


def test_unknown_option_is_named(third_party):
    with pytest.raises(kt.TowerError, match="'lone' does not take .*speed"):
        kt.strategy("lone", speed=3)


def test_errors_inside_are_not_mistaken(third_party):
    with pytest.raises(TypeError, match="len"):
        kt.strategy("broken")


def test_names_are_known_without_tensorflow_work():
    assert registry.find("horovod").value.endswith(":HorovodStrategy")
