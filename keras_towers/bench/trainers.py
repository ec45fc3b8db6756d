"""How the rows of the benchmark train, in one of their processes.

Each is set up as its users would do it. TensorFlow is imported inside the
functions, so that listing the rows does not start it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import SGD, BenchModel

if TYPE_CHECKING:
    from keras_towers.reduction.compression import CompressionName
    from keras_towers.strategies.processes import ProcessStrategy


@dataclass(frozen=True)
class Workload:
    """The model, data and devices of one process.

    Attributes:
        model: a model of the benchmark.
        meeting: this process and the others.
        devices: the towers of this process; empty: the row chooses.
        batch: examples per step and process.
        steps: the number of steps to provide data for.
    """

    model: BenchModel
    meeting: Meeting
    devices: Sequence[str]
    batch: int
    steps: int

    def data(self) -> tuple[Any, Any]:
        """Return the global batches of all steps, concatenated."""
        return self.model.data(self.steps * self.meeting.size * self.batch)

    def part(self) -> tuple[Any, Any]:
        """Return this process's share of each global batch."""

        def mine(array: Any) -> Any:
            shape = (self.steps, self.meeting.size, self.batch)
            parts = array.reshape(*shape, *array.shape[1:])
            return parts[:, self.meeting.rank].reshape(-1, *array.shape[1:])

        x, y = self.data()
        return mine(x), mine(y)


@dataclass(frozen=True)
class Times:
    """The times at which batches and epochs started, and training ended.

    A custom loop has no epochs, because nothing happens at their end.
    """

    batches: list[float]
    epochs: list[float] = field(default_factory=list)
    loss: float | None = None


@dataclass(frozen=True)
class Trainer:
    """One process of a row, ready to train.

    Attributes:
        train: trains for a number of steps per epoch and of epochs.
        bias: returns the bias of the last layer, to check that ranks agree.
        choice: the option that the row chose, if it had a choice.
        jit_compile: returns after training whether XLA compiled the step.
    """

    train: Callable[[int, int], Times]
    bias: Callable[[], list[float]]
    choice: str | None = None
    jit_compile: Callable[[], bool] = lambda: False


def _fit(
    work: Workload, model: Any, choice: str | None = None, whole: bool = False
) -> Trainer:
    """Train with ``fit``, on whole global batches or this process's share."""
    data = work.data() if whole else work.part()
    batch = work.batch * (work.meeting.size if whole else 1)
    timer = _make_timer()

    def train(steps: int, epochs: int) -> Times:
        history = model.fit(
            *(array[: steps * batch] for array in data),
            batch_size=batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[timer],
        )
        loss = float(history.history["loss"][-1])
        return Times(timer.batches, timer.epochs, loss)

    return Trainer(
        train, lambda: bias(model), choice, lambda: bool(model.jit_compile)
    )


def loop(
    batches: Callable[[int], Iterable[tuple[Any, Any]]],
    step: Callable[[Any, Any], Any],
    bias: Callable[[], list[float]],
) -> Trainer:
    """Train with a custom loop, without metrics and callbacks.

    Args:
        batches: returns a given number of batches of inputs and labels.
        step: trains on one batch and returns its loss.
        bias: returns the bias of the last layer.
    """

    def train(steps: int, epochs: int) -> Times:
        starts, losses = [], []
        for _ in range(epochs):
            for x, y in batches(steps):
                starts.append(time.perf_counter())
                losses.append(step(x, y))
        return Times(starts, loss=float(sum(losses)) / len(losses))

    return Trainer(train, bias)


def bias(model: Any) -> list[float]:
    """Return the bias of a Keras model's last layer."""
    return model.trainable_variables[-1].numpy().tolist()


@contextlib.contextmanager
def keras_alone(
    work: Workload, optimizer: Callable[[], Any] = lambda: None
) -> Iterator[Trainer]:
    """Use no strategy; the optimizer may exchange gradients."""
    yield _fit(work, work.model.build(optimizer()))


def averaging_sgd() -> Any:
    """Return a hand-written optimizer based on Horovod's operations."""
    import horovod.tensorflow as hvd
    import keras

    class AveragingSGD(keras.optimizers.SGD):
        """Averages gradients over the ranks before it applies them."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            means = hvd.grouped_allreduce(list(grads), op=hvd.Average)
            return super().apply(means, trainable_variables)

    hvd.init()
    return AveragingSGD(**SGD)


def drop_in_sgd() -> Any:
    """Return the optimizer of a script written for Horovod."""
    import keras

    import keras_towers.horovod as hvd

    hvd.init()
    return hvd.DistributedOptimizer(keras.optimizers.SGD(**SGD))


@contextlib.contextmanager
def mirrored(work: Workload, reduction: str | None = None) -> Iterator[Trainer]:
    """Use ``MirroredStrategy``, with one of its cross-device operations."""
    import tensorflow as tf

    operations = getattr(tf.distribute, reduction)() if reduction else None
    strategy = tf.distribute.MirroredStrategy(work.devices, operations)
    with strategy.scope():
        model = work.model.build()
    yield _fit(work, model)


@contextlib.contextmanager
def towers(
    work: Workload, make: Callable[[Sequence[str]], Any]
) -> Iterator[Trainer]:
    """Use one of this package's strategies in one process."""
    strategy = make(work.devices)
    # The model is built outside, as in the README.
    model = work.model.build()
    with strategy:
        yield _fit(work, model, strategy.mode)


@contextlib.contextmanager
def horovod_strategy(
    work: Workload, compression: CompressionName | None = None
) -> Iterator[Trainer]:
    """Use ``HorovodStrategy``, with the same data on every rank."""
    import keras_towers as kt

    with kt.HorovodStrategy(compression=compression) as strategy:
        yield in_strategy(work, strategy, compression)


@contextlib.contextmanager
def served(work: Workload, name: str) -> Iterator[Trainer]:
    """Use a strategy over parameter servers, with the same data on each."""
    import keras_towers as kt

    with kt.strategy(name) as strategy:
        servers = len(strategy._servers.connection.devices)
        choice = f"{servers} ps"
        yield _fit(work, work.model.build(), choice, whole=True)


@contextlib.contextmanager
def byteps_strategy(work: Workload) -> Iterator[Trainer]:
    """Use ``BytePSStrategy``, with the same data on every rank."""
    import keras_towers as kt

    with kt.BytePSStrategy():
        yield _fit(work, work.model.build(), None, whole=True)


def in_strategy(
    work: Workload,
    strategy: ProcessStrategy,
    compression: CompressionName | None,
) -> Trainer:
    """Train in the block of a strategy of several processes."""
    from keras_towers.reduction import shared_memory

    # As the strategy decides; GPUs are hidden from the ranks.
    memory = shared_memory.available(strategy._config.transport)
    choice = "shared memory" if memory and not compression else None
    return _fit(work, work.model.build(), choice, whole=True)


def _make_timer() -> Any:
    """Create a callback that records when batches and epochs start.

    Times from start to start include the handling of data and metrics.
    """
    import keras

    class Timer(keras.callbacks.Callback):
        """Records the times of the last call of ``fit``."""

        def on_train_begin(self, logs: Any = None) -> None:
            self.batches: list[float] = []
            self.epochs: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epochs.append(time.perf_counter())

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.batches.append(time.perf_counter())

        def on_train_end(self, logs: Any = None) -> None:
            self.epochs.append(time.perf_counter())

    return Timer()
