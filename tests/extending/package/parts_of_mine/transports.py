"""A transport of the processes of one machine."""

import collections
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_towers.extending import EngineTransport, join_job


class FolderTransport(EngineTransport):
    """Ranks write what they send to a folder, and read what others do."""

    name = "a folder"

    def __init__(self) -> None:
        job = join_job(self.name)
        super().__init__(job)
        if job.size > 1 and job.rank == 0:
            job.put("folder", tempfile.mkdtemp())
        if job.size > 1:
            self._folder = Path(job.get("folder", timeout_s=60))
        self._turns: collections.Counter[str] = collections.Counter()
        self._round = 0
        self._ended = threading.Event()

    def engine_sum(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        # In the same order on all ranks: to the same bits.
        return [
            tf.add_n(self._of_all_ranks(tensor, f"{key}.{number}"))
            for number, tensor in enumerate(tensors)
        ]

    def engine_gather(self, tensor: tf.Tensor, key: str) -> tf.Tensor:
        return tf.concat(self._of_all_ranks(tensor, key), 0)

    def _of_all_ranks(self, tensor: tf.Tensor, key: str) -> list[tf.Tensor]:
        def exchange(content: bytes) -> object:
            return np.array(self._exchange(content, key), object)

        content = tf.io.serialize_tensor(tensor)
        contents = tf.numpy_function(exchange, [content], tf.string)
        return [
            tf.io.parse_tensor(contents[rank], tensor.dtype)
            for rank in range(self.size)
        ]

    def _exchange(self, content: bytes, key: str) -> list[bytes]:
        """Return what each rank sends under a key, which is used again."""
        self._turns[key] += 1
        turn = self._turns[key]
        name = f"{self._round}.{key}.{{}}.{{}}"
        path = self._folder / name.format(turn, self.rank)
        part = self._folder / f"part-{path.name}"
        part.write_bytes(content)
        part.rename(path)
        # Those who have written another turn have read the one before.
        old = self._folder / name.format(turn - 2, self.rank)
        old.unlink(missing_ok=True)
        return [
            self._read(self._folder / name.format(turn, rank))
            for rank in range(self.size)
        ]

    def _read(self, path: Path) -> bytes:
        while not path.exists():
            if self._ended.is_set():
                raise RuntimeError("another rank has left the call")
            time.sleep(0.001)
        return path.read_bytes()

    def abort(self) -> None:
        """Wait no longer: the call has failed on another rank."""
        self._ended.set()

    def renew(self) -> None:
        """Begin again: all ranks have left their calls."""
        self._turns.clear()
        self._round += 1
        self._ended.clear()
