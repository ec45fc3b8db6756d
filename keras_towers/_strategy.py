"""TensorFlow's strategies, with types that TensorFlow does not declare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    class Strategy:
        """``tf.distribute.Strategy``; a value on every replica is ``Any``."""

        @property
        def extended(self) -> Any: ...

        @property
        def cluster_resolver(self) -> Any: ...

        @property
        def num_replicas_in_sync(self) -> int: ...

        def scope(self) -> contextlib.AbstractContextManager[Any]: ...

        def run(
            self,
            fn: Callable[..., Any],
            args: Iterable[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
            options: Any = None,
        ) -> Any: ...

        def reduce(
            self, reduce_op: Any, value: Any, axis: int | None
        ) -> Any: ...

        def gather(self, value: Any, axis: int) -> Any: ...

        def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...

        def experimental_distribute_dataset(
            self, dataset: Any, options: Any = None
        ) -> Any: ...

        def distribute_datasets_from_function(
            self, dataset_fn: Callable[[Any], Any], options: Any = None
        ) -> Any: ...

        def experimental_distribute_values_from_function(
            self, value_fn: Callable[[Any], Any]
        ) -> Any: ...

    class MirroredStrategy(Strategy):
        """``tf.distribute.MirroredStrategy``."""

else:
    import tensorflow as tf

    Strategy = tf.distribute.Strategy
    MirroredStrategy = tf.distribute.MirroredStrategy
