"""Training over TensorFlow's own runtime, in one rank of the benchmark.

With ``MultiWorkerMirroredStrategy`` on Keras 3 ``fit`` crashes while building
the model, so its row is the training loop from TensorFlow's guide: the model is
created in the strategy's scope, ``strategy.run`` is called on each batch, and
Keras's optimizer all-reduces the gradients. The ring is also the default on
CPUs; it is set explicitly so that the row means the same on every machine. The
loop has no metrics or callbacks, which works in its favour.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from keras_towers.bench.meeting import Meeting
from keras_towers.bench.trainers import (
    Trainer,
    Workload,
    in_strategy,
    last_weights,
    loop,
)

if TYPE_CHECKING:
    from keras_towers.reduction.compression import CompressionName


@contextlib.contextmanager
def ring_loop(work: Workload) -> Iterator[Trainer]:
    """Create a rank; call this before TensorFlow has run anything."""
    _join_cluster(work.meeting)
    import tensorflow as tf

    experimental = tf.distribute.experimental
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation.RING
        )
    )
    with strategy.scope():
        model = work.model.build()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            # Under a strategy Keras divides it by the number of ranks, because
            # its optimizer sums gradients over them.
            loss = model.compute_loss(x, y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, [weight.value for weight in weights])
        model.optimizer.apply(grads, weights)
        return loss * work.meeting.size

    @tf.function
    def run(x: Any, y: Any) -> Any:
        return strategy.run(step, args=(x, y))

    data = tf.data.Dataset.from_tensor_slices(work.part()).batch(work.batch)
    yield loop(
        work,
        lambda steps: data.take(steps).prefetch(2),
        run,
        lambda: last_weights(model),
    )


@contextlib.contextmanager
def strategy(
    work: Workload, compression: CompressionName | None = None
) -> Iterator[Trainer]:
    """Use ``MultiWorkerTowerStrategy``, with the same data on every rank."""
    _join_cluster(work.meeting)
    import keras_towers as kt

    with kt.MultiWorkerTowerStrategy(compression=compression) as entered:
        yield in_strategy(work, entered, compression)


def _join_cluster(meeting: Meeting) -> None:
    """Tell TensorFlow the addresses of the ranks, with free ports."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        ports = meeting.exchange("port", str(held.getsockname()[1]))
    cluster = {"worker": [f"localhost:{port}" for port in ports]}
    task = {"type": "worker", "index": meeting.rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
