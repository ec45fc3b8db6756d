"""Replicas that train whole batches: with averaged gradients, or asynchronous.

Queues, accumulators and the coordinator are the parts of
``tf.compat.v1.train.SyncReplicasOptimizer`` (Chen, Pan, Monga, Bengio and
Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016).
"""
