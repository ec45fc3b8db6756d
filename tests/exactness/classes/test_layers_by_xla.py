"""Every layer of the installed Keras that XLA compiles, exact and compiled.

Ways to hold weights take turns: what XLA has compiled stays mapped into memory,
and Linux limits how many maps a process has.
"""

import functools

import pytest

import keras_towers as kt
from tests.exactness.classes import groups
from tests.exactness.classes.layer_recipes import LAYERS
from tests.kit.meshes import on_a_mesh
from tests.kit.sampling import long_unless

pytestmark = pytest.mark.alternate

# Compiling takes long: `make test` has one small group for each way.
GROUP, SHORT = 6, "Activation "
WAYS = {
    "copies": lambda _: kt.TowerStrategy(2, updates="each"),
    "shards": lambda _: kt.TowerStrategy(2, weights="sharded"),
    "mesh": lambda group: on_a_mesh(group.model.variables, 2),
}
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

# XLA rounds fused operations differently.
ROUNDING = 2e-4


def _cases():
    """The first group in every way, and each other one in one of them."""
    names = [name for name in LAYERS if name not in NOT_COMPILED]
    for number, start in enumerate(range(0, len(names), GROUP)):
        some = {name: LAYERS[name] for name in names[start : start + GROUP]}
        for way in [[*WAYS][number % len(WAYS)]] if number else WAYS:
            name = f"{next(iter(some))} and others, {way}"
            yield pytest.param(some, WAYS[way], id=name)


@pytest.mark.parametrize(
    ("recipes", "scope_of"),
    long_unless(lambda case: case.id.startswith(SHORT), _cases()),
)
def test_layers_are_those_of_one_device(recipes, scope_of, functions):
    make = functools.partial(groups.of_recipes, xla=True)
    assert not groups.compared(recipes, make, scope_of, ROUNDING)
    assert functions["not"] == []
