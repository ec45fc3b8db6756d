"""Tries a first sum over NCCL, to find out whether it works here.

Links between GPUs, drivers and containers can keep NCCL from working, and only
a sum shows it. A strategy tries one before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from keras_towers.foundation.errors import TowerError, shorten
from keras_towers.foundation.settings import ENV_NCCL_TIMEOUT, NCCL_TIMEOUT_S
from keras_towers.foundation.system import call_within
from keras_towers.jobs.rendezvous import failed_calls
from keras_towers.jobs.rendezvous.rank_environment import seconds
from keras_towers.transport import Transport


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


def failure_over_ranks(
    transport: Transport, gpu: str | None, sum_on: Callable[[str | None], None]
) -> str:
    """Add up a part of each rank; return why that fails, or nothing.

    All ranks get an answer of the same meaning. Collective.

    Args:
        transport: connects the ranks.
        gpu: the device of this rank that sums, or None.
        sum_on: makes the transport sum on a device, over NCCL.
    """
    own = "it has no GPU" if gpu is None else obstacle()
    for rank, hindrance in enumerate(transport.gather_objects(own)):
        if hindrance:
            return f"rank {rank}: {hindrance}"

    def totals() -> list[tf.Tensor]:
        with tf.device(gpu):
            part = tf.identity(part_of(transport.rank))
            return transport.all_reduce([part], "kt.nccl")

    calls = failed_calls.calls
    calls.begin(transport)
    transport.note_wait("a first sum over NCCL")
    sum_on(gpu)
    why = failure_of(totals, transport.size)
    sum_on(None)
    try:
        if not why:
            transport.gather_objects(True)
            return ""
    except tf.errors.OpError as error:
        why = shorten(error)
    finally:
        transport.note_wait("")
        calls.end()

    def leave() -> str:
        first = calls.fail(transport, why)
        calls.begin(transport)
        calls.end()
        return f"rank {first.rank}: {first.why}" if first else why

    try:
        return call_within(NCCL_TIMEOUT_S, leave)
    except TimeoutError:
        raise TowerError(
            f"NCCL does not work between the ranks ({why}), and "
            f"{transport.name} cannot cancel the sum that it has begun. To sum "
            "in CPU memory, start the job again with "
            f"{ENV_NCCL_TIMEOUT}=0."
        ) from None


def _limit_s() -> int:
    return seconds(ENV_NCCL_TIMEOUT, NCCL_TIMEOUT_S)
