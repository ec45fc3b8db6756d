"""Options that strategies have in common, and how constructors take them."""

import dataclasses
import inspect

import numpy as np
import pytest

import keras_towers as kt
from keras_towers.reduction import power_sgd
from keras_towers.strategies import STRATEGIES
from keras_towers.strategies import options as lib

KEYWORDS = (
    lib.StepKeywords,
    lib.AllReduceKeywords,
    lib.RankKeywords,
    lib.ServerKeywords,
)


@pytest.mark.parametrize("keywords", KEYWORDS)
def test_keywords_are_the_fields_of_options(keywords):
    fields = {f.name: f.type for f in dataclasses.fields(lib.Options)}
    for name, annotation in keywords.__annotations__.items():
        assert annotation.__forward_arg__ == fields[name], name


def test_what_help_shows():
    signature = inspect.signature(kt.TowerStrategy)
    assert list(signature.parameters)[0] == "towers"
    assert signature.parameters["sync_every_epoch"].default is True
    documented = inspect.getdoc(kt.TowerStrategy.__init__)
    for name in lib.AllReduceKeywords.__annotations__:
        assert f"\n    {name}: " in documented
    assert "compression" not in documented


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_first_positional_argument_is_the_devices(name):
    if name in ("horovod", "byteps"):
        pytest.importorskip(name)
    cls = getattr(kt, STRATEGIES[name].kind)
    kinds = {n: p.kind for n, p in inspect.signature(cls).parameters.items()}
    positional = [
        n for n, kind in kinds.items() if kind is not inspect._KEYWORD_ONLY
    ]
    assert positional in (["towers"], [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"compression": "zip"},
            "'zip'.*'bf16-feedback'.*function",
        ),
        ({"exact": True, "compression": "fp16"}, "'fp16' contradicts exact"),
        ({"exact": True, "compression": power_sgd(2)}, "contradicts exact"),
        ({"average": 1}, "average=1 .* True or False"),
        ({"scale_gradient": None}, "scale_gradient=None"),
        ({"packer": 8}, "packer=8 .* a GradientPacker, True, False, or None"),
        ({"exact": True, "random": "tower"}, "contradicts exact=True"),
        ({"stall_shutdown_s": float("nan")}, "stall_shutdown_s=nan"),
        ({"stall_shutdown_s": True}, "stall_shutdown_s=True"),
        ({"sync_every": 0}, "sync_every=0 .* 1 or more"),
        ({"sync_every": True}, "sync_every=True .* a number or None"),
        ({"sync_every": 2, "exact": True}, "contradicts exact=True"),
        ({"sync_every": 2, "updates": "sharded"}, "contradicts updates"),
        ({"sync_every": 2, "average": False}, "contradicts average=False"),
        ({"outer_momentum": 0.9}, "such as sync_every=16"),
        ({"sync_every": 2, "outer_momentum": 1}, "outer_momentum=1 .* less"),
        ({"outer_learning_rate": "1"}, "outer_learning_rate='1' .* a number"),
    ],
)
def test_refused_values(given, message):
    with pytest.raises(kt.TowerError, match=message):
        lib.Options(**given)


def test_exact_decides_what_is_not_given():
    options = lib.Options(exact=np.True_)
    assert (options.batch_norm, options.random) == ("global", "global")
    assert lib.Options().batch_norm == "tower"


@pytest.mark.parametrize(
    ("strategy", "arguments", "error", "message"),
    [
        (
            "sync-replicas",
            {"stall_timeout": 3},
            kt.TowerError,
            "stall_shutdown",
        ),
        ("multi-worker", {"timeout": 3}, kt.TowerError, "heartbeat"),
        ("parameter-server", {"mode": "cpu"}, kt.TowerError, "mode"),
        ("tower", {"bogus": 1}, kt.TowerError, "bogus"),
    ],
)
def test_former_and_unknown_options(strategy, arguments, error, message):
    with pytest.raises(error, match=message):
        kt.strategy(strategy, **arguments)


def test_errors_of_constructors():
    with pytest.raises(TypeError, match=r"TowerStrategy\(\) .*'bogus'"):
        kt.TowerStrategy(bogus=1)
    with pytest.raises(TypeError, match="give options by name"):
        kt.TowerStrategy(2, "cpu")
