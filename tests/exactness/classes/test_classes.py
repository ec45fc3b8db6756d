"""Every layer, loss, metric and optimizer of the installed Keras, exact.

A class that Keras adds has no recipe, and the first test says so. `make test`
tries each class once, in a part that is drawn by a seed; `make test-all` tries
all of it, each layer alone.
"""

import os
import random
from collections.abc import Iterable

import keras
import pytest

import keras_towers as kt
from tests.exactness.classes import groups, listed, optimizer_recipes
from tests.exactness.classes.layer_recipes import LAYERS
from tests.exactness.classes.loss_recipes import (
    LOSSES,
    METRICS,
    VALUES,
    loss_recipes,
    metric_recipes,
)
from tests.exactness.classes.optimizer_recipes import OPTIMIZERS, modes_of
from tests.exactness.classes.recipes import BATCH, Recipe, public
from tests.kit.compare import assert_exact

# Another draws another part, such as the date.
SEED = int(os.environ.get("KERAS_TOWERS_TEST_SEED", "1"))
TOWERS = (2, 3)
GROUP = 40

RECIPES: dict[str, dict[str, dict[str, Recipe]]] = {
    "layers": {name: {name: recipe} for name, recipe in LAYERS.items()},
    "losses": {name: loss_recipes(name) for name in LOSSES},
    "metrics": {name: metric_recipes(name) for name in (*METRICS, *VALUES)},
}
NAMES = {**RECIPES, "optimizers": OPTIMIZERS}


@pytest.mark.core
@pytest.mark.parametrize("namespace", NAMES)
def test_each_class_has_a_recipe(namespace):
    classes = public(namespace)
    known = {*NAMES[namespace], *listed.NO_PART}
    missing = [names for names in classes.values() if not known & set(names)]
    assert not missing, (
        f"keras.{namespace} has classes without a recipe: add one, or the "
        "reason why there is none to tests/exactness/classes/listed.py"
    )


def _there(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Leave out what is only told of."""
    return {n: r for n, r in recipes.items() if n not in listed.TOLD}


def _part(namespace: str) -> list[dict[str, Recipe]]:
    """One recipe of every class, in groups that each make a model."""
    drawn = random.Random(SEED)
    one_each = dict(
        drawn.choice(list(variants.items()))
        for variants in RECIPES[namespace].values()
    )
    names = list(_there(one_each))
    drawn.shuffle(names)
    # Where one device needs no graph, it is faster.
    names.sort(key=lambda name: bool(one_each[name].in_graph))
    graphless = [name for name in names if not one_each[name].in_graph]
    return [
        {name: one_each[name] for name in group}
        for kind in (graphless, names[len(graphless) :])
        for group in _of_size(GROUP, kind)
    ]


def _of_size(size: int, names: list[str]) -> Iterable[list[str]]:
    return (names[i : i + size] for i in range(0, len(names), size))


@pytest.mark.parametrize(
    "group", _part("layers"), ids=lambda group: f"{len(group)} layers"
)
def test_each_layer_once(group):
    assert not groups.compare(group, towers=2, eager=True)


@pytest.mark.parametrize("namespace", ["losses", "metrics"])
def test_each_once(namespace):
    for group in _part(namespace):
        assert not groups.compare(group, towers=2, eager=True)


@pytest.mark.long
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("name", _there(LAYERS))
def test_a_layer_alone(name, towers):
    assert not groups.compare({name: LAYERS[name]}, towers)


@pytest.mark.long
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_with_all_reductions(name, towers):
    assert not groups.compare(loss_recipes(name), towers)


@pytest.mark.long
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_all_metrics(weighted, towers):
    recipes = {
        name: recipe
        for variants in RECIPES["metrics"].values()
        for name, recipe in variants.items()
        if name.endswith("weighted") == weighted
    }
    assert not groups.compare(recipes, towers)


@pytest.mark.parametrize("name", listed.TOLD)
def test_what_differs_is_told(name):
    told = groups.told_of({name: LAYERS[name]}, towers=2)
    assert any("on" in message and "device" in message for message in told)


def _drawn_modes() -> list[tuple[str, str]]:
    drawn = random.Random(SEED)
    return [(name, drawn.choice(modes_of(name))) for name in OPTIMIZERS]


def _assert_optimizer(name, mode, towers):
    def fit(model):
        x, y = optimizer_recipes.X, optimizer_recipes.Y
        return model.fit(
            x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
        )

    keras.backend.clear_session()
    assert_exact(
        lambda: optimizer_recipes.model(name, mode),
        fit,
        kt.TowerStrategy(towers, exact=True),
        tolerance=groups.TOLERANCE,
    )


@pytest.mark.parametrize(("name", "mode"), _drawn_modes())
def test_each_optimizer_once(name, mode):
    _assert_optimizer(name, mode, towers=2)


@pytest.mark.long
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in OPTIMIZERS for mode in modes_of(name)],
)
def test_an_optimizer_in_each_mode(name, mode, towers):
    _assert_optimizer(name, mode, towers)
