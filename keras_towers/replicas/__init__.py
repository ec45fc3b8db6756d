"""Replicas of a model: synchronous or asynchronous, and their meeting point.

The files of this folder itself are the round of replicas without any model, the
parts of ``tf.compat.v1.train.SyncReplicasOptimizer`` (Chen, Pan, Monga, Bengio
and Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016).
"""
