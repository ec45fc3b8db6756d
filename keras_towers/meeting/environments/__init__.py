"""The launchers and managers of clusters that a process may run under."""

from keras_towers.meeting.environments.launchers import (
    HOW_TO_BE_ALONE,
    LAUNCHERS,
    ClusterEnvironment,
    detect,
)
from keras_towers.meeting.environments.managers import allocation

__all__ = [
    "HOW_TO_BE_ALONE",
    "LAUNCHERS",
    "ClusterEnvironment",
    "allocation",
    "detect",
]
