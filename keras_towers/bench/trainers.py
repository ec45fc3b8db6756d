"""How the rows of the benchmark train, in one of their processes.

Each is set up as its users would do it. TensorFlow is imported inside the
functions, so that listing the rows does not start it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_towers.bench.meeting import Meeting
from keras_towers.bench.models import Trained, Wrap
from keras_towers.bench.times import Times, make_recorder

if TYPE_CHECKING:
    from keras_towers.fit.contract import Updates
    from keras_towers.reduction.compression import CompressionName
    from keras_towers.strategies.processes import ProcessStrategy


# Of a variable, to check that ranks agree.
_WITNESSES = 1000


@dataclass(frozen=True)
class Workload:
    """The model, data and devices of one process.

    Attributes:
        model: a model of the benchmark.
        meeting: this process and the others.
        devices: the towers of this process; empty: the row chooses.
        batch: examples per step and process.
        steps: the number of steps to provide data for.
        waits: whether every step waits for its loss. On a GPU, and with JAX, it
            otherwise ends before what it started.
    """

    model: Trained
    meeting: Meeting
    devices: Sequence[str]
    batch: int
    steps: int
    waits: bool = False

    def data(self) -> tuple[Any, Any]:
        """Return the global batches of all steps, concatenated."""
        return self._data

    @functools.cached_property
    def _data(self) -> tuple[Any, Any]:
        return self.model.data(self.steps * self.meeting.size * self.batch)

    def part(self) -> tuple[Any, Any]:
        """Return this process's share of each global batch."""

        def mine(array: Any) -> Any:
            shape = (self.steps, self.meeting.size, self.batch)
            parts = array.reshape(*shape, *array.shape[1:])
            return parts[:, self.meeting.rank].reshape(-1, *array.shape[1:])

        x, y = self.data()
        return mapped(mine, x), mapped(mine, y)


def mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to the arrays of nested lists, tuples and dicts."""
    if isinstance(structure, dict):
        return {k: mapped(function, value) for k, value in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(mapped(function, value) for value in structure)
    return function(structure)


@dataclass(frozen=True)
class Trainer:
    """One process of a row, ready to train.

    Attributes:
        train: trains for a number of steps per epoch and of epochs. In its
            first call every step waits for its loss.
        witness: returns weights of the last layer, to check that ranks agree.
        choice: the option that the row chose, if it had a choice.
        jit_compile: returns after training whether XLA compiled the step.
    """

    train: Callable[[int, int], Times]
    witness: Callable[[], list[float]]
    choice: str | None = None
    jit_compile: Callable[[], bool] = lambda: False


def fit(
    work: Workload, model: Any, choice: str | None = None, whole: bool = False
) -> Trainer:
    """Train with ``fit``, on whole global batches or this process's share."""
    data = work.data() if whole else work.part()
    batch = work.batch * (work.meeting.size if whole else 1)
    recorders = _first_and_later(work)

    def train(steps: int, epochs: int) -> Times:
        recorder = next(recorders)
        start = time.perf_counter()
        history = model.fit(
            *(mapped(lambda array: array[: steps * batch], d) for d in data),
            batch_size=batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[recorder],
        )
        loss = float(history.history["loss"][-1])
        return recorder.times(start, loss)

    return Trainer(
        train,
        lambda: last_weights(model),
        choice,
        lambda: bool(model.jit_compile),
    )


def _first_and_later(work: Workload) -> Iterator[Any]:
    """The callbacks of the first call of ``fit`` and of each later one."""
    yield make_recorder(waits=True)
    while True:
        yield make_recorder(work.waits)


def loop(
    work: Workload,
    batches: Callable[[int], Iterable[tuple[Any, Any]]],
    step: Callable[[Any, Any], Any],
    witness: Callable[[], list[float]],
) -> Trainer:
    """Train with a custom loop, without metrics and callbacks.

    Args:
        work: the workload of this process.
        batches: returns a given number of batches of inputs and labels.
        step: trains on one batch and returns its loss.
        witness: returns weights of the last layer.
    """
    waits = itertools.chain([True], itertools.repeat(work.waits))

    def train(steps: int, epochs: int) -> Times:
        wait, first_step_s = next(waits), None
        starts: list[float] = []
        losses: list[Any] = []
        start = time.perf_counter()
        for _ in range(epochs):
            losses.clear()
            for x, y in batches(steps):
                starts.append(time.perf_counter())
                loss = step(x, y)
                losses.append(float(loss) if wait else loss)
                if wait and first_step_s is None:
                    first_step_s = time.perf_counter() - start
        return Times(
            starts,
            loss=float(sum(losses)) / len(losses),
            losses=losses if wait else [],
            first_step_s=first_step_s,
        )

    return Trainer(train, witness)


def last_weights(model: Any) -> list[float]:
    """Return weights of a Keras model's last layer: a bias, or a part of it."""
    import numpy as np

    # On any backend, of any shape and dtype.
    last = np.asarray(model.trainable_variables[-1].numpy(), np.float64)
    return last.ravel()[:_WITNESSES].tolist()


@contextlib.contextmanager
def keras_alone(work: Workload, wrap: Wrap | None = None) -> Iterator[Trainer]:
    """Use no strategy; the wrapped optimizer may exchange gradients."""
    yield fit(work, work.model.build(wrap))


def averaging(optimizer: Any) -> Any:
    """Return a hand-written optimizer based on Horovod's operations."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    class Averaging(type(optimizer)):  # type: ignore[misc]
        """Averages gradients over the ranks before it applies them."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            # Horovod groups dense gradients only.
            means = hvd.grouped_allreduce(
                [tf.convert_to_tensor(grad) for grad in grads], op=hvd.Average
            )
            return super().apply(means, trainable_variables)

    hvd.init()
    return Averaging.from_config(optimizer.get_config())


def drop_in(optimizer: Any) -> Any:
    """Return the optimizer of a script written for Horovod."""
    import keras_towers.horovod as hvd

    hvd.init()
    return hvd.DistributedOptimizer(optimizer)


@contextlib.contextmanager
def mirrored(work: Workload, reduction: str | None = None) -> Iterator[Trainer]:
    """Use ``MirroredStrategy``, with one of its cross-device operations."""
    import tensorflow as tf

    operations = getattr(tf.distribute, reduction)() if reduction else None
    strategy = tf.distribute.MirroredStrategy(work.devices, operations)
    with strategy.scope():
        model = work.model.build()
    yield fit(work, model)


@contextlib.contextmanager
def towers(
    work: Workload, make: Callable[[Sequence[str]], Any]
) -> Iterator[Trainer]:
    """Use one of this package's strategies in one process."""
    strategy = make(work.devices)
    # The model is built outside, as in the README.
    model = work.model.build()
    with strategy:
        yield fit(work, model, strategy.mode)


@contextlib.contextmanager
def horovod_strategy(
    work: Workload,
    compression: CompressionName | None = None,
    updates: Updates | None = None,
) -> Iterator[Trainer]:
    """Use ``HorovodStrategy``, with the same data on every rank."""
    import keras_towers as kt

    with kt.HorovodStrategy(
        compression=compression, updates=updates
    ) as strategy:
        yield in_strategy(work, strategy, compression)


@contextlib.contextmanager
def served(work: Workload, name: str) -> Iterator[Trainer]:
    """Use a strategy over parameter servers, with the same data on each."""
    import keras_towers as kt

    with kt.strategy(name) as strategy:
        servers = len(strategy._servers.connection.devices)
        choice = f"{servers} ps"
        yield fit(work, work.model.build(), choice, whole=True)


@contextlib.contextmanager
def byteps_strategy(work: Workload) -> Iterator[Trainer]:
    """Use ``BytePSStrategy``, with the same data on every rank."""
    import keras_towers as kt

    with kt.BytePSStrategy():
        yield fit(work, work.model.build(), None, whole=True)


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
    return fit(work, work.model.build(), choice, whole=True)
