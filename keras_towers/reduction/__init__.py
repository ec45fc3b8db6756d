"""Sums of gradients over towers: plain functions from K x N to K x N.

A reduction takes K lists of N gradients (one list per tower) and the names of
the K towers' devices, and returns K lists of N sums, each on its tower's
device. Gradients may be ``tf.Tensor`` or ``tf.IndexedSlices``.

=============================  ==============================================
``sum_on_host``                all sums on the host's CPU (mode "cpu")
``sum_on_towers``              gradient i on tower i mod K (mode "gpu")
``hierarchical_all_reduce``    two groups, then across (mode "hierarchical")
``CollectiveAllReduce(...)``   TensorFlow's collective ops (mode "collective")
``nccl_all_reduce``            NVIDIA's NCCL (mode "nccl")
``nccl_available``             whether NCCL can run on devices, and why (not)
``packed(reduction, packer)``  the same sums over a few large buffers
``GradientPacker(...)``        decides how gradients go into buffers
``ReductionCrossDeviceOps``    a reduction inside a ``tf.distribute.Strategy``
``check_towers``               refuses gradients that do not match
``across_ranks``               extends a reduction to several processes
``exact``, ``fp16``, ...       exchanges: sums between processes
``SharedMemoryExchange(...)``  without loss, between processes on one machine
``with_error_feedback(...)``   compensates for the rounding of an exchange
=============================  ==============================================
"""

from keras_towers.reduction.across_ranks import across_ranks, sum_over_ranks
from keras_towers.reduction.at_variables import sum_at_variables
from keras_towers.reduction.collective import CollectiveAllReduce
from keras_towers.reduction.compression import (
    CompressionName,
    bf16_shards,
    fp16,
    fp16_shards,
)
from keras_towers.reduction.cross_device import ReductionCrossDeviceOps
from keras_towers.reduction.error_feedback import with_error_feedback
from keras_towers.reduction.exchange import Exchange, exact
from keras_towers.reduction.gradients import (
    Gradient,
    Gradients,
    Reduction,
    check_towers,
    divided,
    scaled,
)
from keras_towers.reduction.hierarchical import hierarchical_all_reduce
from keras_towers.reduction.naive import sum_on_host, sum_on_towers
from keras_towers.reduction.nccl import nccl_all_reduce, nccl_available
from keras_towers.reduction.packing import GradientPacker, PackingPlan, packed
from keras_towers.reduction.placed import host_of
from keras_towers.reduction.shared_memory import SharedMemoryExchange

__all__ = [
    "CollectiveAllReduce",
    "CompressionName",
    "Exchange",
    "Gradient",
    "GradientPacker",
    "Gradients",
    "PackingPlan",
    "Reduction",
    "ReductionCrossDeviceOps",
    "SharedMemoryExchange",
    "across_ranks",
    "bf16_shards",
    "check_towers",
    "divided",
    "exact",
    "fp16",
    "fp16_shards",
    "hierarchical_all_reduce",
    "host_of",
    "nccl_all_reduce",
    "nccl_available",
    "packed",
    "scaled",
    "sum_at_variables",
    "sum_on_host",
    "sum_on_towers",
    "sum_over_ranks",
    "with_error_feedback",
]
