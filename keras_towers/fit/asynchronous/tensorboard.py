"""What has been observed of an epoch's steps, for TensorBoard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras


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
