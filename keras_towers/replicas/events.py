"""What replicas tell the coordinator."""

from __future__ import annotations

import enum


class Event(enum.IntEnum):
    """What the coordinator is told."""

    ARRIVED = 0
    """A replica has pushed its gradients."""
    JOINED = 1
    """A replica begins to compute a gradient, and wants tokens for more."""
    LEFT = 2
    """A replica has no more data."""
    FLUSH = 3
    """What has arrived is to be applied, even if it is not enough."""
    END = 4
    """The coordinator is to end."""
    ASKED = 5
    """Somebody waits until all of the above has been handled."""
    RETURNED = 6
    """A replica that had begun was started again, and waits for a welcome."""
    LOST = 7
    """A replica has died or stopped."""
