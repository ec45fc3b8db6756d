"""Steps as users write them, after published examples and research code."""

from tests.partition.hostile import (  # noqa: F401
    fitted,
    gradients,
    representations,
    structured,
    unusual,
)
from tests.partition.hostile.table import STEPS

__all__ = ["STEPS"]
