"""Replicas that train whole batches: with averaged gradients, or asynchronous.

``named_resources``
  Named resources of TensorFlow's runtime, and functions that use them.
``accumulators``
  Accumulators, which average the gradients of a variable.
``replica_counts``
  Counts of gradients: of an update, and of each replica.
``staleness``
  The staleness of asynchronous steps: measured, not bounded.
``replica_group``
  The state that a model's replicas share, and what is done with it.
``averages``
  Averages of the replicas' gradients, and updates by them.
``coordinator``
  The thread that counts arrivals and applies averages.
``hogwild``
  Asynchronous updates of shared weights, as in Hogwild! (Recht et al., 2011).
``tower_threads``
  Training steps of asynchronous towers, and the threads that run them.
``replica_calls``
  Calls of Keras's methods on replicas, here or on workers.

Queues, accumulators and the coordinator are the parts of
``tf.compat.v1.train.SyncReplicasOptimizer`` (Chen, Pan, Monga, Bengio and
Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016).
"""
