"""A first sum over NCCL, which shows whether it works here.

Links between GPUs, drivers and containers can keep NCCL from adding up, and
only a sum shows it. A strategy tries one before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_towers.errors import TowerError, shorten
from keras_towers.rendezvous import failed_calls
from keras_towers.rendezvous.rank_environment import seconds
from keras_towers.settings import ENV_NCCL_TIMEOUT, NCCL_TIMEOUT_S
from keras_towers.system import call_within

if TYPE_CHECKING:
    from keras_towers.transport.engine_transport import EngineTransport

_OFF = f"{ENV_NCCL_TIMEOUT} is 0"


def part_of(member: int) -> tf.Tensor:
    """Return what a member adds to the sum: whole numbers, which are exact."""
    return tf.constant([member + 1, (member + 1) ** 2], tf.float32)


def failure_of(totals: Callable[[], Sequence[Any]], members: int) -> str:
    """Add up the parts of all members; return why that fails, or nothing.

    Args:
        totals: returns the sums that this process gets.
        members: how many parts there are.
    """
    limit_s = _limit_s()
    if not limit_s:
        return _OFF
    try:
        found = call_within(limit_s, lambda: np.array(totals()))
    except TimeoutError:
        return f"a first sum has not ended after {limit_s} s"
    except Exception as error:
        return shorten(error)
    wanted = np.sum([part_of(k) for k in range(members)], 0)
    if (found == wanted).all():
        return ""
    return f"a first sum is {found.tolist()} instead of {wanted.tolist()}"


def _limit_s() -> int:
    return seconds(ENV_NCCL_TIMEOUT, NCCL_TIMEOUT_S)


def failure_between_ranks(transport: EngineTransport, gpu: str | None) -> str:
    """Add up a part of each rank; return why that fails, or nothing.

    All ranks get an answer of the same meaning. Collective.

    Args:
        transport: connects the ranks.
        gpu: the device of this rank that sums; None: it has none.

    Raises:
        TowerError: NCCL hangs, and the engine cannot end it.
    """
    own = "it has no GPU" if gpu is None else "" if _limit_s() else _OFF
    obstacles = transport.gather_objects(own)
    for rank, obstacle in enumerate(obstacles):
        if obstacle:
            return f"rank {rank}: {obstacle}"

    def totals() -> list[tf.Tensor]:
        with tf.device(gpu):
            part = tf.identity(part_of(transport.rank))
            return transport.all_reduce([part], "kt.nccl")

    calls = failed_calls.calls
    calls.begin(transport)
    transport.note_wait("a first sum over NCCL")
    transport.sum_on(gpu)
    why = failure_of(totals, transport.size)
    transport.sum_on(None)
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
            f"{transport.name} cannot end what it has begun: start the job "
            f"again with {ENV_NCCL_TIMEOUT}=0, and ranks sum on the host."
        ) from None
