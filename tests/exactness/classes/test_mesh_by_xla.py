import pytest

from tests.exactness.classes.layers_by_xla import (
    assert_exact_and_compiled,
    each_group,
)
from tests.kit.meshes import on_a_mesh

pytestmark = pytest.mark.alternate


@each_group
def test_layers_are_those_of_one_device_on_a_mesh(recipes, functions):
    assert_exact_and_compiled(
        recipes, lambda group: on_a_mesh(group.model.variables, 2), functions
    )
