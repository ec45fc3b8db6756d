"""TensorFlow's strategies, with types that TensorFlow does not declare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

    class Strategy:
        """``tf.distribute.Strategy``; a value on every replica is ``Any``."""

        @property
        def extended(self) -> Any: ...

        @property
        def cluster_resolver(self) -> object: ...

        @property
        def num_replicas_in_sync(self) -> int: ...

        def scope(self) -> contextlib.AbstractContextManager[object]: ...

        def run(
            self,
            fn: Callable[..., Any],
            args: Iterable[object] = (),
            kwargs: Mapping[str, object] | None = None,
            options: object = None,
        ) -> Any: ...

        def reduce(
            self, reduce_op: object, value: object, axis: int | None
        ) -> Any: ...

        def gather(self, value: object, axis: int) -> Any: ...

        def experimental_local_results(
            self, value: object
        ) -> tuple[Any, ...]: ...

        def experimental_distribute_dataset(
            self, dataset: tf.data.Dataset[Any], options: object = None
        ) -> Any: ...

        def distribute_datasets_from_function(
            self,
            dataset_fn: Callable[..., tf.data.Dataset[Any]],
            options: object = None,
        ) -> Any: ...

        def experimental_distribute_values_from_function(
            self, value_fn: Callable[..., object]
        ) -> Any: ...

    class MirroredStrategy(Strategy):
        """``tf.distribute.MirroredStrategy``."""

else:
    import tensorflow as tf

    Strategy = tf.distribute.Strategy
    MirroredStrategy = tf.distribute.MirroredStrategy
