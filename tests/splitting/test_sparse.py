"""Sparse rows of a batch: what is proven, and what is told."""

import pytest

from tests.splitting.hostile.table import CASES
from tests.splitting.hostile.trial import tried

NAMES = ["sparse_product_of_rows", "dense_of_sparse", "sparse_softmax_of_all"]


@pytest.mark.parametrize("name", NAMES)
def test_sparse_rows(name):
    assert tried(name, 2).verdict(CASES[name], exact=False) == ""
