"""TensorFlow tunes and optimizes, and Python collects, less than usual."""

import gc
import os

import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops, multi_device_iterator_ops

OPTIMIZED = "KERAS_TOWERS_TEST_OPTIMIZED"
UNTUNED = tf.data.Options()
UNTUNED.autotune.enabled = False


def leave_untuned(optimize=False):
    """Have it so from now on in this process, which has imported all it needs.

    Args:
        optimize: whether graphs are optimized nevertheless.
    """
    _do_not_tune_iterators()
    do_not_optimize_graphs(not optimize)
    # Tracing makes many objects that live on, and by default each few hundred
    # of them are searched. Modules that are imported for good need not be.
    gc.freeze()
    gc.set_threshold(20_000, 10, 5)


def do_not_optimize_graphs(off=True):
    """Turn off, or on again, the passes over graphs before their first run.

    They take a third of a first step, and give the same results. They stay on
    everywhere with the variable ``KERAS_TOWERS_TEST_OPTIMIZED``.
    """
    off = off and OPTIMIZED not in os.environ
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": off}
    )


def search_no_more():
    """Collect garbage, and leave what remains out of later searches.

    To be called between tests: caches keep much of what they trace, and each
    ``clear_session`` begins with a search of all there is.
    """
    gc.collect()
    gc.freeze()


def _do_not_tune_iterators():
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


def _of_untuned(make):
    def init(self, dataset=None, *arguments, **options):
        if dataset is not None:
            dataset = dataset.with_options(UNTUNED)
        make(self, dataset, *arguments, **options)

    return init
