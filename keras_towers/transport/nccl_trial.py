"""Tries a first sum over NCCL, to find out whether it works here.

Links between GPUs, drivers and containers can keep NCCL from working, and only
a sum shows it. A strategy tries one before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_towers.errors import shorten
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.settings import ENV_NCCL_TIMEOUT, NCCL_TIMEOUT_S
from keras_towers.system import call_within


def obstacle() -> str:
    """Return why no first sum is tried, or nothing."""
    return "" if _limit_s() else f"{ENV_NCCL_TIMEOUT} is 0"


def part_of(member: int) -> tf.Tensor:
    """Return what a member adds to the sum: whole numbers, which are exact."""
    return tf.constant([member + 1, (member + 1) ** 2], tf.float32)


def failure_of(totals: Callable[[], Sequence[object]], members: int) -> str:
    """Add up the parts of all members; return why that fails, or nothing.

    Args:
        totals: returns the sums that this process gets.
        members: how many parts there are.
    """
    if off := obstacle():
        return off
    limit_s = _limit_s()
    try:
        sums = call_within(limit_s, lambda: np.array(totals()))
    except TimeoutError:
        return f"a first sum has not ended after {limit_s} s"
    except Exception as error:
        return shorten(error)
    wanted = np.sum([part_of(k) for k in range(members)], 0)
    if (sums == wanted).all():
        return ""
    return f"a first sum is {sums.tolist()} instead of {wanted.tolist()}"


def _limit_s() -> int:
    return seconds(ENV_NCCL_TIMEOUT, NCCL_TIMEOUT_S)
