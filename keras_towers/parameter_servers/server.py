"""The work of a task of the role ``ps``, until training has ended."""

from __future__ import annotations

import contextlib
import time

import tensorflow as tf

from keras_towers import settings
from keras_towers._notices import announce as tell
from keras_towers.errors import TowerError
from keras_towers.meeting import store
from keras_towers.meeting.addresses import answers
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.meeting.liveness import Liveness
from keras_towers.parameter_servers import introduction
from keras_towers.parameter_servers.remote import join
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
    missing = set(range(cluster.size))
    reached = Liveness.of_answers(
        missing, lambda rank: answers(cluster.workers[rank])
    )
    while True:
        missing -= {rank for rank in missing if _has_ended(cluster, rank)}
        if 0 not in missing:
            break
        reached.look(0)
        # It may not have been started yet.
        if reached.signs[0] and reached.silent_s(0) > settings.CHIEF_LOST_S:
            end_in_time()
            raise TowerError(
                f"{cluster} ends: the chief cannot be reached any more at "
                f"{cluster.workers[0]}. Start all tasks of the job again, from "
                "a backup."
            )
        time.sleep(settings.SERVER_LOOK_S)
    reached.look(*missing)
    begun = time.monotonic()
    while missing:
        missing -= {rank for rank in missing if _has_ended(cluster, rank)}
        reached.look(*missing)
        now = time.monotonic()
        if all(
            now - max(begun, reached.heard[rank]) > settings.LOST_S
            for rank in missing
        ):
            break
        time.sleep(settings.SERVER_LOOK_S)
    return sorted(missing)


def _has_ended(cluster: Cluster, rank: int) -> bool:
    there = introduction.store_on(cluster.index)
    return there.get(introduction.goodbye(cluster, rank)) is not None
