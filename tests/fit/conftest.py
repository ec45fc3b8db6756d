"""Tests that search for what is left on towers start from what is there."""

import pytest

from tests.fit import ordinary


@pytest.fixture(autouse=True)
def own_variables_only(request):
    if hasattr(request.module, "variables_on_towers"):
        ordinary.forget_other_tests()
