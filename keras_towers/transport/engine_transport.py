"""The common part of all engines: import, and collectives."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from keras_towers.errors import TowerError
from keras_towers.rendezvous import versions, watch
from keras_towers.transport import Transport, messages, plain


def load(name: str, title: str) -> ModuleType:
    """Import ``name.tensorflow``, or raise an error with instructions."""
    install = f"run `keras-towers install {name}`"
    # A script of that name would run a second time.
    found = sys.modules.get(name) is None and importlib.util.find_spec(name)
    if found and found.submodule_search_locations is None:
        raise TowerError(
            f"{title} is hidden by {found.origin}, which has its name: rename "
            "that file."
        )
    try:
        return importlib.import_module(f"{name}.tensorflow")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        raise TowerError(
            f"{title} is not installed in this environment: {install}."
        ) from error
    except (ImportError, OSError, tf.errors.NotFoundError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TowerError(
            f"{title} does not load with TensorFlow {tf.__version__}; it was "
            f"probably built for another version, or on another machine: "
            f"{install} to build it for this one. (The error was: {reason})"
        ) from error


class EngineTransport(Transport):
    """The common part of all engines' transports.

    Attributes:
        engine: tells this process's place by the functions ``rank``, ``size``,
            ``local_rank`` and ``local_size``.
        carries: the dtypes that the engine sends as they are; None: all.
    """

    carries: Collection[tf.DType] | None = messages.CARRIED

    # Later strategies may be created by some ranks only.
    _compared = False

    def __init__(self, engine: Any):
        self.engine = engine
        self._functions: dict[tuple, Callable] = {}

    @property
    def rank(self) -> int:
        return int(self.engine.rank())

    @property
    def size(self) -> int:
        return int(self.engine.size())

    @property
    def local_rank(self) -> int:
        return int(self.engine.local_rank())

    @property
    def local_size(self) -> int:
        return int(self.engine.local_size())

    @abstractmethod
    def _sum(self, tensors: Sequence[tf.Tensor], key: str) -> list[tf.Tensor]:
        """Sum tensors of dtypes that engines can sum."""

    @abstractmethod
    def _send(
        self, tensors: Sequence[tf.Tensor], key: str, root: int
    ) -> list[tf.Tensor]:
        """Send the root's tensors, of dtypes in ``carries``, to all ranks."""

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], key: str
    ) -> list[tf.Tensor]:
        def total(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sums = self._sum([messages.summable(t) for t in tensors], key)
            return [
                messages.summed(value, tensor.dtype)
                for value, tensor in zip(sums, tensors, strict=True)
            ]

        return self._traced(f"all_reduce.{key}", total, tensors)

    def broadcast(
        self, tensors: Sequence[tf.Tensor], key: str, root: int = 0
    ) -> list[tf.Tensor]:
        key = f"{key}.from{root}"

        def send(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sent = [messages.carried(t, self.carries) for t in tensors]
            return [
                messages.received(value, tensor.dtype)
                for value, tensor in zip(
                    self._send(sent, key, root), tensors, strict=True
                )
            ]

        return self._traced(f"broadcast.{key}", send, tensors)

    def mark(self, what: str) -> None:
        watch.mark(what)

    def passed(self) -> None:
        """Record that the wait marked last is over."""
        watch.passed()

    def gather_objects(self, value: Any) -> list[Any]:
        return plain.gather(self.all_gather, value)

    def compare_once(self, engine: str = "") -> None:
        """Compare what the ranks run, when this process first connects."""
        if not EngineTransport._compared and self.size > 1:
            self.compare(engine)
            EngineTransport._compared = True

    def compare(self, engine: str = "") -> None:
        """Compare what the ranks run."""
        everyone = self.gather_objects(versions.process_facts(engine))
        for rank, facts in enumerate(everyone):
            # One line for each that differs from rank 0, by itself.
            versions.compare_facts(
                f"rank {self.rank}",
                everyone[self.rank],
                f"rank {rank}",
                facts,
                warns=rank == 0,
            )

    def _traced(
        self,
        what: str,
        collective: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        tensors: Sequence[tf.Tensor],
        rows: int | None = -1,
    ) -> list[tf.Tensor]:
        """Run a collective, eagerly too, as one traced function.

        Args:
            what: tells it from all others.
            rows: None if the first dimensions differ from call to call.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not tensors:
            return []
        if not tf.executing_eagerly():
            return collective(tensors)
        specs = [
            tf.TensorSpec(
                [None, *t.shape[1:]] if rows is None else t.shape, t.dtype
            )
            for t in tensors
        ]
        form = what, *specs
        if form not in self._functions:
            # TensorFlow takes these for one tf.function that is traced again
            # and again, and warns of it, where they are not concrete.
            function = tf.function(collective, autograph=False)
            self._functions[form] = function.get_concrete_function(specs)
        return self._functions[form](tensors)
