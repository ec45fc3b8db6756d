"""Replicas that train whole batches: with averaged gradients, or asynchronous.

``named_resources``
  Named resources of TensorFlow's runtime, and functions that use them.
``accumulators``
  Accumulators average the gradients of a variable, and drop stale ones.
``replica_counts``
  Counts of gradients: of an update, and of each replica.
``staleness``
  The staleness of asynchronous steps: measured, not bounded.
``replica_group``
  The state that the replicas of a model share, and operations on it.
``averages``
  Averages the replicas' gradients, and updates weights by them.
``coordinator``
  The thread that counts arrivals and applies averages.
``hogwild``
  Asynchronous updates of shared weights, as in Hogwild! (Recht et al., 2011).
``tower_threads``
  Threads of asynchronous towers, and the training steps they run.
``replica_calls``
  Runs calls of Keras's methods on replicas, here or on workers.

Queues, accumulators and the coordinator are the parts of
``tf.compat.v1.train.SyncReplicasOptimizer`` (Chen, Pan, Monga, Bengio and
Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016).
"""
