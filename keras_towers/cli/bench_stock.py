"""TensorFlow's ``MultiWorkerMirroredStrategy`` in one rank of the benchmark.

``fit`` under it crashes on Keras 3 when it builds the model, so this is the
training loop of TensorFlow's guide: the model made in the strategy's scope,
``strategy.run`` on each batch, and Keras's optimizer, which all-reduces the
gradients. The ring is what the strategy takes on a CPU by itself; asking for it
keeps the row what it is called on every machine.

It has neither metrics nor callbacks, which is to its advantage.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from keras_towers.cli.bench_meeting import Meeting
from keras_towers.cli.bench_trainers import Share, Times


class StockLoop:
    """A rank; make it before TensorFlow has run anything.

    Args:
        share: what to train.
    """

    how: str | None = None

    def __init__(self, share: Share):
        _join_cluster(share.meeting)
        import tensorflow as tf

        experimental = tf.distribute.experimental
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            communication_options=experimental.CommunicationOptions(
                implementation=experimental.CommunicationImplementation.RING
            )
        )
        with strategy.scope():
            self._model = share.model.build()
        self._data = tf.data.Dataset.from_tensor_slices(share.part())
        self._batch = share.batch
        self._run = _make_step(strategy, self._model, share)

    def train(self, steps: int, epochs: int = 1) -> Times:
        """Train on the first so many steps, in each epoch."""
        data = self._data.batch(self._batch).take(steps).prefetch(2)
        begins, losses = [], []
        for _ in range(epochs):
            for x, y in data:
                begins.append(time.perf_counter())
                losses.append(self._run(x, y))
        return Times(begins, loss=float(sum(losses)) / len(losses))

    def witness(self) -> list[float]:
        """Return the last layer's bias."""
        return self._model.trainable_variables[-1].numpy().tolist()


def _make_step(strategy: Any, model: Any, share: Share) -> Any:
    import keras
    import tensorflow as tf

    # Under a strategy Keras divides it by the number of ranks, over which its
    # optimizer then sums the gradients.
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        weights = model.trainable_variables
        grads = tape.gradient(loss, [weight.value for weight in weights])
        model.optimizer.apply(grads, weights)
        return loss * share.meeting.size

    @tf.function
    def run(x: Any, y: Any) -> Any:
        return strategy.run(step, args=(x, y))

    return run


def _join_cluster(meeting: Meeting) -> None:
    """Tell TensorFlow where the ranks are, by ports that are free."""
    with socket.socket() as held:
        held.bind(("localhost", 0))
        ports = meeting.exchange("port", str(held.getsockname()[1]))
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": [f"localhost:{port}" for port in ports]},
            "task": {"type": "worker", "index": meeting.rank},
        }
    )
