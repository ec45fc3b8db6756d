"""Every layer of the installed Keras that XLA compiles, exact and compiled."""

import functools

import pytest

import keras_towers as kt
from tests.exactness.classes import groups
from tests.exactness.classes.layer_recipes import LAYERS
from tests.kit.meshes import on_a_mesh
from tests.kit.sampling import long_unless

pytestmark = pytest.mark.alternate

# Compiling takes long: `make test` has one small group for each strategy.
GROUP, SHORT = 6, "Activation "
# One device does not compile these: XLA has no kernel for an operation.
_TURNS = "ImageProjectiveTransformV3"
_LOOKS_UP = "LookupTableFindV2"
_SIZE = "Range, whose size is drawn"
NOT_COMPILED = {
    "AugMix": _TURNS,
    "CutMix": "StatelessRandomGammaV3",
    "HashedCrossing": "SparseCross",
    "Hashing": "StringToHashBucketFast",
    "IntegerLookup": _LOOKS_UP,
    "MixUp": "StatelessRandomGammaV3",
    "RandAugment": _TURNS,
    "RandomElasticTransform": _SIZE,
    "RandomPerspective": _TURNS,
    "RandomRotation": _TURNS,
    "RandomShear": _TURNS,
    "RandomTranslation": _TURNS,
    "RandomZoom": _TURNS,
    "StringLookup": _LOOKS_UP,
    "TextVectorization": "StringSplitV2",
}

STRATEGIES = {
    "copies": lambda _: kt.TowerStrategy(2, updates="each"),
    "shards": lambda _: kt.TowerStrategy(2, weights="sharded"),
    "mesh": lambda group: on_a_mesh(group.model.variables, 2),
}
# XLA rounds fused operations differently.
ROUNDING = 2e-4


def _groups():
    names = [name for name in LAYERS if name not in NOT_COMPILED]
    for start in range(0, len(names), GROUP):
        some = {name: LAYERS[name] for name in names[start : start + GROUP]}
        for strategy in STRATEGIES:
            case = f"{next(iter(some))} and others, {strategy}"
            yield pytest.param(some, strategy, id=case)


@pytest.mark.parametrize(
    ("recipes", "strategy"),
    long_unless(lambda case: case.id.startswith(SHORT), _groups()),
)
def test_layers_are_those_of_one_device_with_xla(recipes, strategy, functions):
    make = functools.partial(groups.of_recipes, xla=True)
    scope_of = STRATEGIES[strategy]
    assert not groups.compared(recipes, make, scope_of, ROUNDING)
    assert functions["not"] == []
