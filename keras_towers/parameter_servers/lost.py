"""What TensorFlow's errors mean where a parameter server is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import tensorflow as tf

from keras_towers import settings
from keras_towers.errors import TowerError
from keras_towers.meeting.addresses import is_reachable
from keras_towers.meeting.environments.tf_config import Cluster

# A server that was started again knows nothing of its clients.
_STARTED_AGAIN = (tf.errors.AbortedError, tf.errors.UnavailableError)


@contextlib.contextmanager
def naming_lost_servers(cluster: Cluster, task: str) -> Iterator[None]:
    """Turn an error that a lost server causes into one that says what to do.

    Args:
        cluster: the job.
        task: what this process is called.

    Raises:
        TowerError: a server is lost. Any other error stays as it is.
    """
    try:
        yield
    except tf.errors.OpError as error:
        time.sleep(settings.DYING_S)
        lost = [
            f"ps {server} at {address}"
            for server, address in enumerate(cluster.ps)
            if not is_reachable(address)
        ]
        if not lost and not isinstance(error, _STARTED_AGAIN):
            raise
        what = (
            f"{' and '.join(lost)} cannot be reached any more"
            if lost
            else "a parameter server was started again, without what it held"
        )
        first, *_ = str(error.message).strip().splitlines() or [""]
        raise TowerError(
            f"{task} has to end: {what}. Start all tasks of the job again, "
            f"from a backup. ({type(error).__name__}: {first})"
        ) from error
