"""Parts that a ``fit`` of replicas has in one process and over servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import keras

from keras_towers.errors import TowerError
from keras_towers.fit.calls import call as call_lib
from keras_towers.fit.calls import callbacks as callbacks_lib
from keras_towers.fit.contract import TowerConfig

T = TypeVar("T")


class TrainFunction(Generic[T]):
    """Hands the next batches of Keras's loop to the call that runs."""

    def __init__(self, call: type[Any], steps: T, refusal: str):
        self._call = call
        self.steps = steps
        self._refusal = refusal

    def __call__(self, iterator: Any) -> Any:
        """Train on the next ``steps_per_execution`` batches."""
        call: Any = call_lib.current()
        if not isinstance(call, self._call):
            raise TowerError(self._refusal)
        return call.train(self.steps, iterator)


def refuse_eager(config: TowerConfig, model: keras.Model) -> None:
    """Refuse a model whose steps are not to be compiled."""
    if model.run_eagerly:
        raise TowerError(
            f"{config.name} needs compiled steps, but model {model.name!r} is "
            "set to run_eagerly=True: compile it without, or debug it outside "
            "of the strategy."
        )


def with_writer(given: dict[str, Any], write: Callable[[int], None]) -> None:
    """Write summaries of each epoch, if ``fit`` is given a ``TensorBoard``."""
    callbacks = given.get("callbacks")
    board = keras.callbacks.TensorBoard
    boards = [
        c for c in callbacks_lib.listed(callbacks) if isinstance(c, board)
    ]
    if not boards:
        return

    def write_to_all(epoch: int, logs: Any) -> None:
        for each in boards:
            with each._train_writer.as_default():
                write(epoch)

    writer = keras.callbacks.LambdaCallback(on_epoch_end=write_to_all)
    given["callbacks"] = callbacks_lib.with_added(callbacks, writer)
