"""Steps as people write them who have never heard of towers, by their names."""

from tests.exactness.strangers import (  # noqa: F401
    batches,
    contrastive,
    generative,
    habits,
    programs,
    sequences,
    training,
)
from tests.exactness.strangers.base import CASES

__all__ = ["CASES"]
