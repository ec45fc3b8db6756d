"""Becoming one of the ranks that ``TF_CONFIG`` names."""

from __future__ import annotations

import keras
import tensorflow as tf

import keras_towers
from keras_towers.errors import TowerError
from keras_towers.meeting.environments.tf_config import Cluster
from keras_towers.transport import peers, runtime
from keras_towers.transport.base import Transport
from keras_towers.transport.runtime import Task

# So long that any text of versions fits.
_CHARACTERS = 256

_watch: peers.PeerWatch | None = None
_checked = False


def join(cluster: Cluster, timeout_s: float, start_timeout_s: float) -> Task:
    """Start this process's task, wait for the others, and watch them.

    Args:
        cluster: this process among the others.
        timeout_s: how long a rank may give no sign of life from now on; for
            all strategies of this process, as they share the collectives.
        start_timeout_s: how long to wait for the others.

    Raises:
        TowerError: this or another task does not start.
    """
    global _watch
    task = runtime.start(cluster)
    peers.wait_for(task, start_timeout_s)
    if _watch is None:
        _watch = peers.PeerWatch(task, timeout_s)
        _watch.start()
    _watch.timeout_s = timeout_s
    return task


def check_versions_once(transport: Transport) -> None:
    """Check the versions where this process creates its first strategy.

    Later ones may be created by some ranks only.

    Raises:
        TowerError: they differ; raised on every rank.
    """
    global _checked
    if not _checked:
        check_versions(transport)
        _checked = True


def check_versions(transport: Transport) -> None:
    """Check that all ranks have the same versions of what they run.

    Raises:
        TowerError: they differ; raised on every rank.
    """
    mine = (
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}, "
        f"keras_towers {keras_towers.__version__}"
    )
    # Of fixed size, and by one operation: also others have to understand it.
    data = mine.encode()[:_CHARACTERS].ljust(_CHARACTERS)
    told = transport.all_gather(tf.io.decode_raw(data, tf.int32), "kt.versions")
    texts = [
        row.tobytes().decode(errors="replace").strip()
        for row in tf.reshape(told, [transport.size, -1]).numpy()
    ]
    if len(set(texts)) > 1:
        each = "; ".join(f"rank {r}: {t}" for r, t in enumerate(texts))
        raise TowerError(
            "the ranks have different versions, and may not train alike: "
            f"{each}. Install the same everywhere."
        )
