"""Every layer, loss, metric and optimizer of the installed Keras, exact.

A class that Keras adds has no recipe, and the first test says so. Recipes are
trained in groups, of which `make test` draws some by a seed; `make test-all`
has all of them.
"""

import pytest

from tests.exactness.classes import (
    groups,
    loss_recipes as of_losses,
    optimizer_recipes,
)
from tests.exactness.classes.layer_recipes import ALL_LAYERS, LAYERS
from tests.exactness.classes.recipes import NO_PART, public
from tests.kit.sampling import sample_of
from tests.partition.computed_once import ONCE, computed_once
from tests.partition.steps import on_towers

GROUP, DRAWN = 12, 32

# The recipes of each class, by name.
PARTS = {
    "layers": {name: {name: recipe} for name, recipe in LAYERS.items()},
    "losses": {n: of_losses.loss_recipes(n) for n in of_losses.LOSSES},
    "metrics": {
        name: of_losses.metric_recipes(name)
        for name in (*of_losses.METRICS, *of_losses.VALUES)
    },
    "optimizers": optimizer_recipes.modes(),
}
WAYS = {
    "at once": {"updates": "once"},
    "weights in shards": {"weights": "sharded", "updates": "each"},
}
# With an older Keras, groups are of other recipes.
COMPLETE = (ALL_LAYERS, of_losses.ALL_LOSSES, of_losses.ALL_METRICS) == (
    LAYERS,
    of_losses.LOSSES,
    of_losses.METRICS,
)


@pytest.mark.core
@pytest.mark.parametrize("namespace", PARTS)
def test_each_class_has_a_recipe(namespace):
    classes = public(namespace)
    known = {*PARTS[namespace], *NO_PART}
    missing = [names for names in classes.values() if not known & set(names)]
    assert not missing, (
        f"keras.{namespace} has classes without a recipe: add one, or the "
        "reason why there is none to tests/exactness/classes/recipes.py"
    )


def _groups():
    """Some recipes of a kind each, which are trained as one model."""
    for kind, classes in PARTS.items():
        recipes = [item for parts in classes.values() for item in parts.items()]
        # In shards each weight's slots have to be known.
        ways = WAYS if kind == "optimizers" else ["at once"]
        for start in range(0, len(recipes), GROUP):
            some = dict(recipes[start : start + GROUP])
            for way in ways:
                name = f"{kind} from {next(iter(some))}, {way}"
                yield pytest.param(kind, some, way, id=name)


@pytest.mark.parametrize(
    ("kind", "recipes", "way"), sample_of(_groups(), DRAWN)
)
def test_classes_are_those_of_one_device(kind, recipes, way, small_shards):
    make = groups.of_recipes
    if kind == "optimizers":
        make = optimizer_recipes.group
    programs = []
    towers = on_towers(programs, **WAYS[way])
    assert not groups.compared(recipes, make, lambda _: towers)
    if not COMPLETE:
        return
    # Programs are too large for pytest to show.
    once, first = computed_once(programs), next(iter(recipes))
    assert once == ONCE.get(f"{first}, {way}", ONCE.get(first, ""))
