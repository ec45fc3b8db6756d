"""Sums of gradients over towers: plain functions from K x N to K x N.

A reduction takes K lists of N gradients (one list per tower) and the names of
the K towers' devices, and returns K lists of N sums, each on its tower's
device, or raises a ``TowerError`` where the towers' gradients do not match.
Gradients may be ``tf.Tensor`` or ``tf.IndexedSlices``.

=============================  ==============================================
``sum_on_host``                all sums on the host's CPU (mode "host")
``sum_on_towers``              gradient i on tower i mod K (mode "towers")
``hierarchical_all_reduce``    two groups, then across (mode "hierarchical")
``CollectiveAllReduce(...)``   TensorFlow's collective ops (mode "collective")
``nccl_all_reduce``            NVIDIA's NCCL (mode "nccl")
``nccl_available``             whether NCCL can run on devices, and why (not)
``failure_of_sum``             why a first sum over devices fails
``PackedReduction(reduction, packer)``  the same sums over a few large buffers
``GradientPacker(...)``        decides how gradients go into buffers
``sum_over_ranks``             sums over processes, by a hook
``RankSum``                    likewise, with the state of a hook that has one
``StatefulHook``               the base class of hooks with a state
``PowerSGD(rank)``             a hook that sends low-rank factors of matrices
``hook_for``                   other hooks, by name
``shared_memory``              lossless sums over processes on one machine
=============================  ==============================================

``communication_hooks``
  Sums over processes by communication hooks, which may send less.
``compression``
  The values of ``compression=``: hooks by name, and what they change.
``gradients``
  Arguments and results of reductions: K towers with N gradients each.
``rank_sum``
  Sums of gradients over ranks, and the variables of their hook's state.
``shared_memory``
  Lossless sums over the processes of one machine, in shared memory.
``stateful_hooks``
  Communication hooks that keep a state from one step to the next.
``tower_sums``
  Sums over the towers of a process: by additions, collective ops, or NCCL.
"""

# ``as`` marks a name as re-exported.
from keras_towers.reduction.communication_hooks import (
    CommunicationHook as CommunicationHook,
    sum_over_ranks as sum_over_ranks,
)
from keras_towers.reduction.compression import (
    CompressionName as CompressionName,
    describe_effect as describe_effect,
    hook_for as hook_for,
)
from keras_towers.reduction.gradients import (
    Gradient as Gradient,
    Gradients as Gradients,
    Reduction as Reduction,
    checked as checked,
    divide as divide,
    on_values as on_values,
    scaled as scaled,
)
from keras_towers.reduction.rank_sum import (
    RankSum as RankSum,
    SavedStates as SavedStates,
)
from keras_towers.reduction.stateful_hooks import (
    ErrorFeedback as ErrorFeedback,
    HookState as HookState,
    NesterovMomentum as NesterovMomentum,
    PowerSGD as PowerSGD,
    StatefulHook as StatefulHook,
    as_stateful as as_stateful,
)
from keras_towers.reduction.tower_sums import (
    GradientPacker as GradientPacker,
    PackedReduction as PackedReduction,
)
from keras_towers.reduction.tower_sums import (
    CollectiveAllReduce as CollectiveAllReduce,
    hierarchical_all_reduce as hierarchical_all_reduce,
    nccl_all_reduce as nccl_all_reduce,
    failure_of_sum as failure_of_sum,
    nccl_available as nccl_available,
    sum_at_variables as sum_at_variables,
    sum_on_host as sum_on_host,
    sum_on_towers as sum_on_towers,
)
