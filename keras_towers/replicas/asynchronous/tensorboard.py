"""What has been observed of an epoch's steps, for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_towers.fit.calls import callbacks as callbacks_lib


class ToTensorBoard(keras.callbacks.Callback):
    """Writes what was observed to TensorBoard at the end of each epoch.

    Args:
        boards: the ``TensorBoard`` callbacks of ``fit``.
        write: given the epoch, writes summaries to the default writer.
    """

    def __init__(
        self,
        boards: Sequence[keras.callbacks.TensorBoard],
        write: Callable[[int], None],
    ):
        super().__init__()
        self._boards = boards
        self._write = write

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write what was observed."""
        for board in self._boards:
            with board._train_writer.as_default():
                self._write(epoch)


def with_writer(
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    write: Callable[[int], None],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Write what is observed if there is a ``TensorBoard`` callback.

    Args:
        method: ``fit``, as Keras defines it.
        args: the user's positional arguments, without the model.
        kwargs: the user's keyword arguments.
        write: as for ``ToTensorBoard``.

    Returns:
        Positional and keyword arguments.
    """
    given = callbacks_lib.by_name(method, args, kwargs)
    callbacks = given.get("callbacks")
    listed = callbacks_lib.listed(callbacks)
    board = keras.callbacks.TensorBoard
    boards = [c for c in listed if isinstance(c, board)]
    if not boards:
        return args, kwargs
    writer = ToTensorBoard(boards, write)
    given["callbacks"] = callbacks_lib.with_added(callbacks, writer)
    return (), given
