import pytest

import keras_towers as kt
from tests.exactness.classes.layers_by_xla import (
    assert_exact_and_compiled,
    each_group,
)

pytestmark = pytest.mark.alternate


@each_group
def test_layers_are_those_of_one_device_on_copies(recipes, functions):
    assert_exact_and_compiled(
        recipes, lambda _: kt.TowerStrategy(2, updates="each"), functions
    )
