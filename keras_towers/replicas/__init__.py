"""TensorFlow's accumulators and queues, by which replicas keep in step.

The parts of ``tf.compat.v1.train.SyncReplicasOptimizer``, without any model:
replicas push gradients into accumulators and wait for tokens; one thread takes
the average of enough gradients, has it applied, and hands out new tokens
(Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting Distributed Synchronous
SGD", 2016).
"""

from keras_towers.replicas.accumulators import Accumulators
from keras_towers.replicas.coordinator import Coordinator
from keras_towers.replicas.counts import ReplicaCounts
from keras_towers.replicas.group import Group

__all__ = ["Accumulators", "Coordinator", "Group", "ReplicaCounts"]
