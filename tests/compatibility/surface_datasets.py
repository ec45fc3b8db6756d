"""Observations of distributed values and datasets."""

import tensorflow as tf

from tests.compatibility.observing import (
    error_of,
    observed,
    plain,
)


def _datasets() -> dict[str, tf.data.Dataset]:
    rows = tf.data.Dataset.range(18)
    return {
        "whole": rows.batch(6),
        "partial": rows.batch(8),
        "dropped": rows.batch(8, drop_remainder=True),
        "small": rows.take(1).batch(4),
        "unbatched": rows.take(3),
        "structure": rows.map(
            lambda i: {"x": (i, tf.cast(i, tf.float32)), "y": tf.fill([2], i)}
        ).batch(8),
        "ragged": rows.map(lambda i: tf.range(i % 3)).ragged_batch(8),
        "unknown": rows.batch(8).filter(lambda batch: batch[0] < 16),
        "repeated": rows.shuffle(18, seed=7).repeat(2).batch(12),
    }


@observed
def distribute_dataset(strategy):
    found = {}
    for name, dataset in _datasets().items():

        def read(dataset=dataset):
            distributed = strategy.experimental_distribute_dataset(dataset)
            return [
                isinstance(distributed, tf.distribute.DistributedDataset),
                repr(distributed.element_spec),
                [strategy.experimental_local_results(b) for b in distributed],
            ]

        found[name] = error_of(read)
    return found


@observed
def distribute_dataset_in_a_function(strategy):
    found = []
    for name in ("partial", "structure"):
        dataset = _datasets()[name]
        distributed = strategy.experimental_distribute_dataset(dataset)

        @tf.function
        def loop(batches):
            total = tf.constant(0, tf.int64)
            for batch in batches:
                sums = strategy.run(
                    lambda b: tf.reduce_sum(tf.nest.flatten(b)[0]), (batch,)
                )
                total += strategy.reduce("SUM", sums, axis=None)
            return total

        @tf.function
        def step(iterator):
            return strategy.run(
                lambda b: tf.reduce_sum(tf.nest.flatten(b)[0]),
                (next(iterator),),
            )

        found += [loop(distributed), plain(step(iter(distributed)))]
    return found


@observed
def distribute_datasets_from_function(strategy):
    contexts = []

    def make(context):
        contexts.append(
            [
                context.num_replicas_in_sync,
                context.num_input_pipelines,
                context.input_pipeline_id,
                context.get_per_replica_batch_size(12),
            ]
        )
        size = context.get_per_replica_batch_size(12)
        return tf.data.Dataset.range(19).batch(size)

    batches = strategy.distribute_datasets_from_function(make)
    return [
        [strategy.experimental_local_results(batch) for batch in batches],
        repr(batches.element_spec),
        contexts,
    ]
