"""What TensorFlow tunes and optimizes, left as it is."""

import os
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops, multi_device_iterator_ops

OPTIMIZED = "KERAS_TOWERS_TEST_OPTIMIZED"
UNTUNED = tf.data.Options()
UNTUNED.autotune.enabled = False


def do_not_tune_iterators() -> None:
    """Turn off tf.data's autotuner in every iterator that Python makes.

    Destroying an iterator may wait until its autotuner wakes up, which sleeps
    for up to a minute. Garbage collection then stalls some later test.
    """
    for kind in (
        iterator_ops.OwnedIterator,
        multi_device_iterator_ops.OwnedMultiDeviceIterator,
    ):
        kind.__init__ = _of_untuned(kind.__init__)
    part_of_device = multi_device_iterator_ops._create_device_dataset
    multi_device_iterator_ops._create_device_dataset = lambda *arguments: (
        part_of_device(*arguments).with_options(UNTUNED)
    )


def do_not_optimize_graphs(off: bool = True) -> None:
    """Turn off, or on again, the passes over graphs before their first run.

    They take a third of a first step, and give the same results. ``make
    test-all`` leaves them on, everywhere.
    """
    off = off and OPTIMIZED not in os.environ
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": off}
    )


def _of_untuned(make: Any) -> Any:
    def init(
        self: Any, dataset: Any = None, *arguments: Any, **options: Any
    ) -> None:
        if dataset is not None:
            dataset = dataset.with_options(UNTUNED)
        make(self, dataset, *arguments, **options)

    return init
