"""How each row of the benchmark of several processes trains, in one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from keras_towers.cli import bench_rows as rows
from keras_towers.cli.bench_meeting import Meeting
from keras_towers.cli.bench_models import BenchModel
from keras_towers.cli.bench_timing import make_timer


@dataclass(frozen=True)
class Share:
    """What the ranks train on.

    Attributes:
        model: a model of the benchmark.
        meeting: the ranks.
        batch: examples of a step on one rank.
        steps: the steps that there is data for.
    """

    model: BenchModel
    meeting: Meeting
    batch: int
    steps: int

    def data(self) -> tuple[Any, Any]:
        """Return the global batches of all steps, one after the other."""
        return self.model.data(self.steps * self.meeting.size * self.batch)

    def part(self) -> tuple[Any, Any]:
        """Return this rank's part of each global batch."""

        def mine(array: Any) -> Any:
            shape = (self.steps, self.meeting.size, self.batch)
            parts = array.reshape(*shape, *array.shape[1:])
            return parts[:, self.meeting.rank].reshape(-1, *array.shape[1:])

        x, y = self.data()
        return mine(x), mine(y)


@dataclass(frozen=True)
class Times:
    """When something began: batches, epochs and, at last, the end.

    A loop has no epochs: nothing is done at their end.
    """

    batches: list[float]
    epochs: list[float] = field(default_factory=list)
    loss: float | None = None


class Trainer(Protocol):
    """One rank of a row."""

    how: str | None

    def train(self, steps: int, epochs: int = 1) -> Times:
        """Train on the first so many steps, in each epoch."""
        ...

    def witness(self) -> list[float]:
        """Return a few weights, by which to see that ranks agree."""
        ...


class Fit:
    """Trains by Keras's ``fit``.

    Args:
        model: a compiled model.
        data: inputs and labels.
        batch: what ``fit`` is given as batch size.
        how: what the row chose to do, if it had a choice.
    """

    def __init__(
        self,
        model: Any,
        data: tuple[Any, Any],
        batch: int,
        how: str | None = None,
    ):
        self.how = how
        self._model = model
        self._data = data
        self._batch = batch
        self._timer = make_timer()

    def train(self, steps: int, epochs: int = 1) -> Times:
        """Train on the first so many steps, in each epoch."""
        examples = steps * self._batch
        history = self._model.fit(
            *(array[:examples] for array in self._data),
            batch_size=self._batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=[self._timer],
        )
        timer = self._timer
        loss = history.history["loss"][-1]
        return Times(timer.batches, timer.epochs, float(loss))

    def witness(self) -> list[float]:
        """Return the last layer's bias."""
        return self._model.trainable_variables[-1].numpy().tolist()


@contextlib.contextmanager
def trainer(row: str, share: Share) -> Iterator[Trainer]:
    """Build a rank of a row, the way that its users do.

    Args:
        row: one of ``bench_rows.ROWS``.
        share: what to train.
    """
    if row in rows.TORCH_ROWS:
        from keras_towers.cli.bench_torch import torch_loop

        with torch_loop(share, exchanges=row == rows.TORCH) as loop:
            yield loop
    elif row == rows.STOCK:
        from keras_towers.cli.bench_stock import StockLoop

        yield StockLoop(share)
    elif row.startswith(rows.STRATEGY):
        with _strategy(row) as (strategy, how):
            # Every rank is given the same data, and takes its part.
            batch = share.batch * strategy.size
            yield Fit(share.model.build(), share.data(), batch, how)
    else:
        optimizer = {
            rows.COMPUTE: lambda: None,
            rows.RAW: _raw,
            rows.DROP_IN: _drop_in,
        }[row]()
        yield Fit(share.model.build(optimizer), share.part(), share.batch)


@contextlib.contextmanager
def _strategy(row: str) -> Iterator[tuple[Any, str | None]]:
    import keras_towers as kt
    from keras_towers.reduction import SharedMemoryExchange

    compression = row.removeprefix(rows.STRATEGY).removeprefix("-") or None
    with kt.HorovodStrategy(compression=compression) as strategy:
        memory = isinstance(strategy.exchange, SharedMemoryExchange)
        yield strategy, "shared memory" if memory else None


def _raw() -> Any:
    import horovod.tensorflow as hvd
    import keras

    from keras_towers.cli.bench_models import SGD

    class AveragingSGD(keras.optimizers.SGD):
        """What one writes by hand."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            means = hvd.grouped_allreduce(list(grads), op=hvd.Average)
            return super().apply(means, trainable_variables)

    hvd.init()
    return AveragingSGD(**SGD)


def _drop_in() -> Any:
    import keras

    import keras_towers.horovod as hvd
    from keras_towers.cli.bench_models import SGD

    hvd.init()
    return hvd.DistributedOptimizer(keras.optimizers.SGD(**SGD))
