"""Strategies by name."""

import inspect
import sys
from typing import get_args

import pytest

import keras_towers as kt
from keras_towers import strategies as registry

pytestmark = pytest.mark.core

PACKAGE = """
NUMBER = 7
class Lone:
    def __init__(self, towers=1):
        self.towers = towers
class Broken:
    def __init__(self):
        len(3)
"""
ENTRY_POINTS = """
[keras_towers.strategies]
lone = lone_package:Lone
broken = lone_package:Broken
tower = lone_package:Lone
no-module = lone_package.gone:Lone
no-class = lone_package:Gone
number = lone_package:NUMBER
"""


@pytest.fixture(autouse=True)
def third_party(tmp_path, monkeypatch):
    """A package with a strategy of its own."""
    (tmp_path / "lone_package.py").write_text(PACKAGE)
    folder = tmp_path / "lone_package-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: lone-package\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("lone_package", None)


def test_strategies_are_made_by_name_with_options():
    # A name of our own cannot be taken.
    strategy = kt.strategy("tower", towers=2, mode="host")
    assert isinstance(strategy, kt.TowerStrategy)
    assert strategy.num_replicas_in_sync == 2
    assert kt.strategy("tower", 2, mode="host").num_replicas_in_sync == 2
    assert kt.strategy("lone", towers=3).towers == 3
    assert {"lone", "async"} < set(registry.strategy_names())
    assert all(f'``"{n}"``' in kt.strategy.__doc__ for n in registry.STRATEGIES)
    # Its package need not be there.
    assert registry.find("horovod").value.endswith(":HorovodStrategy")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("nope", {}, "'nope'; known are .*lone.*tower"),
        (["tower"], {}, "not the name .*'noop', .*'tower'"),
        ("lone", {"speed": 3}, "'lone' does not take .*speed"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, message):
    with pytest.raises(kt.TowerError, match=message):
        kt.strategy(name, **options)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("no-module", "lone_package.gone:Lone", "ModuleNotFoundError: "),
        ("no-class", "lone_package:Gone", "AttributeError: "),
        ("number", "lone_package:NUMBER", "is 7, not a class"),
    ],
)
def test_a_broken_package_is_named(name, value, cause):
    said = f"'{name}'.*package lone-package.*'{value}'.*{cause}"
    with pytest.raises(kt.TowerError, match=said):
        kt.strategy(name)


def test_errors_of_a_strategy_itself_are_its_own():
    with pytest.raises(TypeError, match="len"):
        kt.strategy("broken")


def test_options_follow_a_name():
    assert registry.parse("tower") == ("tower", {})
    options = {"mode": "host", "towers": 2, "average": False, "of": "{1}"}
    text = "tower:mode=host:towers=2:average=False:of={1}"
    assert registry.parse(text) == ("tower", options)
    with pytest.raises(kt.TowerError, match="gives mode twice"):
        registry.parse("tower:mode=host:mode=nccl")
    with pytest.raises(kt.TowerError, match="no value: write mode=VALUE"):
        registry.parse("tower:mode")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("horovod:comression=fp16", "no option 'comression'. Did you mean 'co"),
        (
            "horovod:compression=fp8",
            "compression='fp8' is not allowed: give 'n",
        ),
        ("horovod:layouts=map", "layouts='map' is not allowed: give a LayoutM"),
        ("tower:compression=fp16", "TowerStrategy has no option 'compression'"),
        ("horovod:weights=sharded:compression=fp16", "holds only its own s"),
        ("multi-worker:start_timeout_s=0", "start_timeout_s=0 is not allowed"),
        ("noop:logs=3", "logs=3 is not allowed: give a dictionary or None"),
        ("sync-replicas:tokens=all", "tokens='all' is not allowed: give 'per_"),
    ],
)
def test_options_are_checked_before_a_strategy_is_imported(text, said):
    with pytest.raises(kt.TowerError) as raised:
        registry.check_options(*registry.parse(text))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "tower:micro_batches=auto:gather_bytes=1MiB:weights=sharded",
        "tower:mode=cpu",
        "parameter-server:ps_device=gpu",
        "horovod:compression=none:packer=False:sync_every=4",
        "noop:logs={}",
        "distributed-parameter-server:caching_device=cpu:sync=False",
    ],
)
def test_what_a_strategy_takes_passes(text):
    registry.check_options(*registry.parse(text))


@pytest.mark.parametrize("name", registry.STRATEGIES)
def test_what_is_read_is_the_signature(name):
    kind = registry.STRATEGIES[name].kind
    strategy = getattr(kt, kind)
    parameters = inspect.signature(strategy).parameters
    wanted = {n: p.annotation for n, p in parameters.items() if n != "options"}
    if "options" in parameters:
        hints = inspect.get_annotations(strategy.__init__, eval_str=True)
        (keywords,) = get_args(hints["options"])
        wanted |= dict.fromkeys(keywords.__annotations__, "")
    assert registry.hints_of(kind) == wanted
