"""Whole training steps: what one device does, divided over four towers.

Of each last batch one tower has no examples. `make test` draws some of the
steps and of Keras's classes by a seed; `make test-all` has all of them.
"""

import contextlib

import pytest

from tests.exactness.classes import groups
from tests.exactness.classes import loss_recipes as of_losses
from tests.exactness.classes.layer_recipes import LAYERS
from tests.kit.long import some_of
from tests.partition.cases import CASES
from tests.partition.computed_once import ONCE, computed_once
from tests.partition.steps import differences, on_towers, trained

DRAWN, CLASSES_DRAWN = 25, 45
GROUP = 12


_WAYS = [(name, way) for name in CASES for way in ("once", "each")]


@pytest.mark.parametrize(("name", "updates"), some_of(_WAYS, DRAWN))
def test_a_step_is_that_of_one_device(name, updates):
    case, programs = CASES[name], []
    one = trained(case, contextlib.nullcontext())
    many = trained(case, on_towers(programs, updates=updates))
    assert not differences(one, many)
    # Programs are too large for pytest to show.
    once = computed_once(programs)
    assert once == ONCE.get(name, "")


# What there is of each class to be tried.
_PARTS = {
    "layers": LAYERS,
    "losses": {
        key: recipe
        for name in of_losses.LOSSES
        for key, recipe in of_losses.loss_recipes(name).items()
    },
    "metrics": {
        key: recipe
        for name in (*of_losses.METRICS, *of_losses.VALUES)
        for key, recipe in of_losses.metric_recipes(name).items()
    },
}


def _groups():
    """Some parts of a kind each, which are trained as one model."""
    for kind, parts in _PARTS.items():
        names = [*parts]
        for start in range(0, len(names), GROUP):
            yield kind, names[start : start + GROUP]


@pytest.mark.parametrize(
    ("kind", "names"),
    some_of(_groups(), CLASSES_DRAWN),
    ids=lambda v: str(v)[:60],
)
def test_keras_classes_are_those_of_one_device(kind, names):
    parts = {name: _PARTS[kind][name] for name in names}
    programs = []
    towers = on_towers(programs)
    assert not groups.compared(parts, groups.of_recipes, towers)
    # Programs are too large for pytest to show.
    once = computed_once(programs)
    assert once == ONCE.get(names[0], "")
