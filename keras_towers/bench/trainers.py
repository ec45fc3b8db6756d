"""Training of the benchmark's rows, in one of their processes."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_towers.bench.models import Stored, Wrap


@dataclass(frozen=True)
class Workload:
    """The model, data and devices of one process."""

    model: Stored
    folder: Path
    rank: int
    size: int
    # Of this process; none: the row chooses.
    devices: Sequence[str]
    # Examples of a global batch.
    batch: int
    steps: int

    @functools.cached_property
    def data(self) -> tuple[Any, Any]:
        """The global batches of all steps, concatenated."""
        return self.model.data(self.steps * self.batch)

    @property
    def share(self) -> int:
        """Examples of this process in each step."""
        return self.batch // self.size

    def part(self) -> tuple[Any, Any]:
        """Return this process's share of each global batch."""
        import keras

        def mine(array: Any) -> Any:
            shape = (self.steps, self.size, self.share)
            parts = array.reshape(*shape, *array.shape[1:])
            return parts[:, self.rank].reshape(-1, *array.shape[1:])

        x, y = keras.tree.map_structure(mine, self.data)
        return x, y


@dataclass
class Times:
    """Moments of one training, in seconds."""

    batches: list[float] = field(default_factory=list)
    # And the end of training; none in custom loops, where epochs do nothing.
    epochs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    first_step_s: float | None = None


@dataclass(frozen=True)
class Trainer:
    """One process of a row, ready to train."""

    # By steps per epoch, epochs, and whether every step waits for its loss.
    train: Callable[[int, int, bool], Times]
    model: Any
    choice: str | None = None


def fit(
    work: Workload, model: Any, choice: str | None = None, whole: bool = False
) -> Trainer:
    """Train with ``fit``, on whole global batches or this process's share."""
    import keras

    data = work.data if whole else work.part()
    batch = work.batch if whole else work.share

    def train(steps: int, epochs: int, waits: bool) -> Times:
        times = Times()
        model.fit(
            *keras.tree.map_structure(lambda a: a[: steps * batch], data),
            batch_size=batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[_recorder(times, waits)],
        )
        return times

    return Trainer(train, model, choice)


def _recorder(times: Times, waits: bool) -> Any:
    """Create a callback that records one call of ``fit``."""
    import keras

    from keras_towers.fit.callbacks import NEVER_STOPS

    began = time.perf_counter()
    total = 0.0

    class Recorder(keras.callbacks.Callback):
        """Records when batches and epochs start."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            nonlocal total
            total = 0.0
            times.epochs.append(time.perf_counter())
            times.losses.clear()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            # From start to start, with the handling of data and metrics.
            times.batches.append(time.perf_counter())

        # Ranks would send a message after each step, to agree to go on.
        setattr(on_train_batch_begin, NEVER_STOPS, True)

        def on_train_end(self, logs: Any = None) -> None:
            times.epochs.append(time.perf_counter())

    class WaitingRecorder(Recorder):
        """Reads each loss, too, for which Keras has to wait."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal total
            # Keras gives the mean over the steps of the epoch so far.
            before, total = total, float((logs or {})["loss"]) * (batch + 1)
            times.losses.append(total - before)
            if times.first_step_s is None:
                times.first_step_s = time.perf_counter() - began

        setattr(on_train_batch_end, NEVER_STOPS, True)

    return WaitingRecorder() if waits else Recorder()


@contextlib.contextmanager
def keras_alone(work: Workload, wrap: Wrap | None = None) -> Iterator[Trainer]:
    """Use no strategy; the wrapped optimizer may exchange gradients."""
    yield fit(work, work.model.build(wrap))


@contextlib.contextmanager
def mirrored(work: Workload, reduction: str) -> Iterator[Trainer]:
    """Use ``MirroredStrategy``, with one of its cross-device operations."""
    import tensorflow as tf

    operations = getattr(tf.distribute, reduction)() if reduction else None
    strategy = tf.distribute.MirroredStrategy(work.devices, operations)
    with strategy.scope():
        model = work.model.build()
    yield fit(work, model)


@contextlib.contextmanager
def in_strategy(
    work: Workload, name: str, options: dict[str, Any]
) -> Iterator[Trainer]:
    """Use one of this package's strategies, by name."""
    import keras_towers as kt

    if not work.devices:
        with kt.strategy(name, **options):
            yield fit(work, work.model.build(), whole=True)
        return
    strategy = kt.strategy(name, towers=list(work.devices), **options)
    # The model is built outside of the block, as in the README.
    model = work.model.build()
    with strategy:
        yield fit(work, model, getattr(strategy, "mode", None), whole=True)


def prepare_devices(device: str, towers: int) -> list[str]:
    """Set up the devices to train on, before TensorFlow initializes them."""
    import tensorflow as tf

    if device == "gpu":
        return [f"/device:GPU:{index}" for index in range(towers)]
    tf.config.set_visible_devices([], "GPU")
    # With more threads one device would use all cores, and the figures would be
    # those of parallel operations instead of the towers.
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(max(4, towers))
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration() for _ in range(towers)],
    )
    return [f"/device:CPU:{index}" for index in range(towers)]
