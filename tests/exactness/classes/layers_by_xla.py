"""Every layer of the installed Keras that XLA compiles, exact and compiled.

Each strategy has a file, and so may have a process: what XLA has compiled stays
mapped into memory, and Linux limits how many maps a process has.
"""

import functools

import pytest

from tests.exactness.classes import groups
from tests.exactness.classes.layer_recipes import LAYERS
from tests.kit.sampling import long_unless

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

# XLA rounds fused operations differently.
ROUNDING = 2e-4


def _groups():
    names = [name for name in LAYERS if name not in NOT_COMPILED]
    for start in range(0, len(names), GROUP):
        some = {name: LAYERS[name] for name in names[start : start + GROUP]}
        yield pytest.param(some, id=f"{next(iter(some))} and others")


each_group = pytest.mark.parametrize(
    "recipes", long_unless(lambda case: case.id.startswith(SHORT), _groups())
)


def assert_exact_and_compiled(recipes, scope_of, functions):
    """Compare a group's layers with those of one device.

    Args:
        recipes: the group.
        scope_of: makes the strategy for it.
        functions: the fixture, which notes what XLA has compiled.
    """
    make = functools.partial(groups.of_recipes, xla=True)
    assert not groups.compared(recipes, make, scope_of, ROUNDING)
    assert functions["not"] == []
