"""Replicas of a model that keep in step, or do not, and where they meet.

This folder's own files are the round of replicas without any model, the parts
of ``tf.compat.v1.train.SyncReplicasOptimizer``: replicas push gradients into
accumulators and wait for tokens; one thread takes the average of enough
gradients, has it applied, and hands out new tokens (Chen, Pan, Monga, Bengio
and Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016).
``asynchronous/`` has the replicas of one process, ``servers/`` those of several
that share weights on parameter servers.
"""

from keras_towers.replicas.counts import ReplicaCounts, Rounds

__all__ = ["ReplicaCounts", "Rounds"]
