"""Replicas that train whole batches: with averaged gradients, or asynchronous.

===================  =========================================================
``named_resources``  queues and variables of TensorFlow's runtime, by name
``accumulators``     averages of the gradients of one variable
``quorum``           how many gradients an update has, of how many replicas
``replica_group``    the state that replicas share, and operations on it
``averages``         updates by averaged gradients
``coordinator``      the thread that applies them
``hogwild``          updates by each tower, without waiting for others
``tower_threads``    the training steps of towers, and threads that run them
``staleness``        how many updates the steps of towers have missed
``replica_calls``    calls of Keras's methods on replicas, here or on workers
===================  =========================================================

Queues, accumulators and the coordinator are the parts of
``tf.compat.v1.train.SyncReplicasOptimizer`` (Chen, Pan, Monga, Bengio and
Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016).
"""
