"""The work of a task of the role ``ps``, until training has ended."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable

import tensorflow as tf

from keras_towers import settings
from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.meeting import store
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.parameter_servers import introduction
from keras_towers.parameter_servers.remote import join
from keras_towers.parameter_servers.roll import Roll, tell_of
from keras_towers.system import end_in_time, keep_freed


def serve(cluster: Cluster) -> None:
    """Serve the workers of a job until all of them have ended."""
    # A worker that dies, or ends with an error, may come back: it has said no
    # goodbye, and is waited for. When the chief has ended well, only workers
    # that can be reached at their addresses are. A chief that dies has lost
    # what it knew of the training, which ends.
    #
    # The server listens at its own address of ``TF_CONFIG``, and is not
    # authenticated, as TensorFlow's servers are not: it belongs in a private
    # network. Models that this process has made before cannot be used any more.
    me = cluster.index
    # Variables are in this machine's memory. Too late where it has begun.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")
    keep_freed()
    try:
        join({"ps": {me: cluster.address}}, job="ps", index=me)
    except tf.errors.OpError as error:
        raise TowerError(
            f"TensorFlow cannot serve as {cluster}: {error.message}"
        ) from error
    store.tell_connected(cluster.number)
    introduction.introduce(cluster, me)
    introduction.store_on(me).put(introduction.opened(), True)
    workers = f"{cluster.size} worker{'s' * (cluster.size > 1)}"
    tell(f"{cluster} serves {workers}")
    lost = _farewells(cluster)
    names = [introduction.task_name(cluster, rank) for rank in lost]
    tell(
        f"ps {me} ends: "
        + ("the chief has ended" if lost else "all workers have ended")
        + (f", and {', '.join(names)} cannot be reached" if lost else "")
    )


def _farewells(cluster: Cluster) -> list[int]:
    """Wait until nobody needs the server any more."""
    store = introduction.store_on(cluster.index)
    missing = set(range(cluster.size))
    roll = Roll(cluster.workers, store)
    asked = -math.inf
    ended = failure = None
    while True:
        said = store.by_rank(introduction.goodbyes(cluster), sorted(missing))
        if 0 in said:
            ended, failure = time.monotonic(), said[0]
        missing -= said.keys()
        now = time.monotonic()
        if now - asked > settings.BEAT_S:
            asked = now
            roll.look()
            if cluster.index == 0:
                tell_of(store, introduction.prefix(cluster), roll.missed())
        if ended is None:
            # It may not have been started yet.
            if roll.signs[0] and roll.silent_s(0) > settings.CHIEF_LOST_S:
                raise _ending(
                    f"{cluster} ends: the chief cannot be reached any more at "
                    f"{cluster.workers[0]}. Start all tasks of the job again, "
                    "from a backup."
                )
        elif _is_over(roll, missing, ended, bool(failure)):
            break
        time.sleep(settings.SERVER_LOOK_S)
    if failure:
        raise _ending(f"{cluster} ends: the chief has failed: {failure}")
    return sorted(missing)


def _is_over(
    roll: Roll, missing: Iterable[int], ended: float, failed: bool
) -> bool:
    """Whether workers that have said no goodbye no longer need the server."""
    waited_s = time.monotonic() - ended
    silent_s = [roll.silent_s(rank) for rank in missing]
    if failed:
        # To hear of it.
        over = all(each > settings.SERVERS_S for each in silent_s)
        return over or waited_s > settings.CHIEF_LOST_S
    return all(min(waited_s, each) > settings.LOST_S for each in silent_s)


def _ending(text: str) -> TowerError:
    end_in_time()
    return TowerError(text)
