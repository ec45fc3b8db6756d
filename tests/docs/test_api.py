"""The API reference has everything that is public."""

import re

import pytest

import keras_towers as kt
from tests.docs.pages import ROOT

pytestmark = pytest.mark.core


def test_all_public_names_are_there():
    page = (ROOT / "docs" / "api.md").read_text()
    listed = re.findall(r"^::: keras_towers\.(\w+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(kt.__all__)
