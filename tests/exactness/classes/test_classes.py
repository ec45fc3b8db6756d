"""Every layer, loss, metric and optimizer of the installed Keras, exact.

A class that Keras adds has no recipe, and the first test says so. `make test`
tries a quarter of the classes, each in one of its parts, and a quarter of the
optimizers in each way, all drawn by a seed; `make test-all` tries all of them.
"""

import itertools
import random

import pytest

import keras_towers as kt
from tests.exactness.classes import groups, listed, optimizer_recipes
from tests.exactness.classes import loss_recipes as of_losses
from tests.exactness.classes.layer_recipes import LAYERS
from tests.exactness.classes.recipes import public
from tests.kit.long import SEED

GROUP = 25

# What there is of each class to be tried, by name.
PARTS = {
    "layers": {name: {name: recipe} for name, recipe in LAYERS.items()},
    "losses": {n: of_losses.loss_recipes(n) for n in of_losses.LOSSES},
    "metrics": {
        name: of_losses.metric_recipes(name)
        for name in (*of_losses.METRICS, *of_losses.VALUES)
    },
    "optimizers": optimizer_recipes.modes(),
}


@pytest.mark.core
@pytest.mark.parametrize("namespace", PARTS)
def test_each_class_has_a_recipe(namespace):
    classes = public(namespace)
    known = {*PARTS[namespace], *listed.NO_PART}
    missing = [names for names in classes.values() if not known & set(names)]
    assert not missing, (
        f"keras.{namespace} has classes without a recipe: add one, or the "
        "reason why there is none to tests/exactness/classes/listed.py"
    )


def _drawn(namespace, rest):
    """A part of every class; or the rest, with what has no other part."""
    drawn, found = random.Random(SEED), {}
    for parts in PARTS[namespace].values():
        one = drawn.choice([*parts])
        others = [name for name in parts if name != one] or [one]
        found |= {name: parts[name] for name in (others if rest else [one])}
    return [(name, found[name]) for name in drawn.sample([*found], len(found))]


def _groups():
    """Groups that each make a model, and how they are tried."""
    for namespace, rest in itertools.product(PARTS, (False, True)):
        make, updates = groups.of_recipes, ["once"]
        if namespace == "optimizers":
            # In shares each weight's slots have to be known.
            make, updates = optimizer_recipes.group, ["once", "sharded"]
        drawn = _drawn(namespace, rest)
        for quarter, way in itertools.product(range(4), updates):
            is_long = rest or quarter != updates.index(way)
            parts = drawn[quarter::4]
            for start in range(0, len(parts), GROUP):
                some = parts[start : start + GROUP]
                yield pytest.param(
                    *(dict(some), make, rest, way),
                    id=f"{len(some)} {namespace} {way}",
                    marks=[pytest.mark.long] * is_long,
                )


@pytest.mark.parametrize(("parts", "make", "rest", "updates"), [*_groups()])
def test_each_class(parts, make, rest, updates):
    strategy = kt.TowerStrategy(3 if rest else 2, updates=updates)
    assert not groups.compared(parts, make, strategy)
