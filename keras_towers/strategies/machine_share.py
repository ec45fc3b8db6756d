"""A rank's share of its machine."""

from __future__ import annotations

import contextlib
import os

import tensorflow as tf

from keras_towers import devices as devices_lib
from keras_towers.errors import TowerError
from keras_towers.rendezvous.environments.tf_config import Cluster
from keras_towers.settings import OWN_GPUS
from keras_towers.system import usable_cores
from keras_towers.transport import Transport


def share_machine(
    place: Transport | Cluster, towers: devices_lib.Towers
) -> devices_lib.Towers:
    """Claim this rank's share of cores and GPUs; return its devices.

    A number of towers is assigned by local rank, unless the launcher shows each
    rank its own GPUs. TensorFlow is shown no others.
    """
    if place.local_size > 1 and "TF_NUM_INTRAOP_THREADS" not in os.environ:
        threads = tf.config.threading
        # Fails once TensorFlow has started; the launcher sets it earlier.
        with contextlib.suppress(RuntimeError):
            if threads.get_intra_op_parallelism_threads() == 0:
                threads.set_intra_op_parallelism_threads(
                    max(1, usable_cores() // place.local_size)
                )
    gpus = tf.config.list_physical_devices("GPU")
    if not isinstance(towers, int) or not gpus:
        return towers
    shows_own = os.environ.get(OWN_GPUS)
    first = 0 if shows_own else place.local_rank * towers
    if first + towers > len(gpus):
        raise TowerError(
            f"rank {place.rank} has local rank {place.local_rank} and "
            f"needs {towers} GPU(s), but its machine has only {len(gpus)}: "
            f"start at most {len(gpus) // towers} processes there."
        )
    share = gpus[first : first + towers]
    # If TensorFlow has already started, the other GPUs stay visible but unused.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices(share, "GPU")
    if tf.config.get_visible_devices("GPU") == share:
        return list(range(towers))
    return list(range(first, first + towers))
