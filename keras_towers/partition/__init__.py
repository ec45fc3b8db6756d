"""One device's step, laid out over towers.

Knows no strategies, no towers and no Keras: it takes a traced graph, and says
what each of several computes of it, what is computed once, and what they
exchange in between.
"""

from keras_towers.partition import rules
from keras_towers.partition.partitioner import UpdateInfo
from keras_towers.partition.partitioning import laid_out, partitioned
from keras_towers.partition.program import Program

__all__ = ["Program", "UpdateInfo", "laid_out", "partitioned", "rules"]
