"""Exchanges among the towers of a process, and sums of gradients over ranks.

``Collectives`` is the protocol of what exchanges tensors among the devices of a
process: it sums, scatters, gathers and broadcasts K lists of N tensors, one
list per device.

=============================  ==============================================
``OnDevice()``                 all on the CPU (mode "host")
``OnTowers()``                 tensor i on tower i mod K (mode "towers")
``Hierarchical()``             two groups, then across (mode "hierarchical")
``CollectiveOps()``            TensorFlow's collective ops (mode "collective")
``NcclAllReduce()``            NVIDIA's NCCL (mode "nccl")
``nccl_available``             whether NCCL can run on devices, and why (not)
``failure_of``                 why first exchanges among devices fail
``Packed(collectives, packer)``  the same in a few large buffers
``GradientPacker(...)``        decides how tensors go into buffers
``sum_over_ranks``             sums over processes, by a hook
``RankSum``                    sums by a hook, and keeps the state of the hook
``StatefulHook``               the base class of hooks with a state
``PowerSGD(rank)``             a hook that sends low-rank factors of matrices
``hook_for``                   other hooks, by name
``shared_memory``              lossless sums over processes on one machine
=============================  ==============================================

``collective_ops``
  Exchanges among devices by TensorFlow's collective ops, and by NCCL.
``collectives``
  Exchanges among the devices of a process: the protocol, and additions.
``compression_hooks``
  Compression of gradients for sums over processes: communication hooks.
``gradients``
  The gradients of K towers: dense or sparse, and checks that they match.
``packing``
  Packs the tensors that towers exchange into a few buffers.
``rank_sum``
  Sums gradients over ranks, dense or sparse; keeps the states of hooks.
``shared_memory``
  Lossless sums over the processes of one machine, in shared memory.
``stateful_hooks``
  Communication hooks that keep a state from one step to the next.
``hook_names``
  The names of hooks: the values of ``compression=``, and their effects.
"""

# ``as`` marks a name as re-exported.
from keras_towers.reduction.collective_ops import (
    CollectiveOps as CollectiveOps,
    NcclAllReduce as NcclAllReduce,
    failure_of as failure_of,
    hint_for as hint_for,
    nccl_available as nccl_available,
)
from keras_towers.reduction.collectives import (
    Collectives as Collectives,
    Hierarchical as Hierarchical,
    OnDevice as OnDevice,
    OnTowers as OnTowers,
    Reduction as Reduction,
    SumsByFunction as SumsByFunction,
)
from keras_towers.reduction.compression_hooks import (
    CommunicationHook as CommunicationHook,
)
from keras_towers.reduction.gradients import (
    Gradient as Gradient,
    Gradients as Gradients,
    divide as divide,
    on_values as on_values,
    scaled as scaled,
)
from keras_towers.reduction.hook_names import (
    CompressionName as CompressionName,
    describe_effect as describe_effect,
    hook_for as hook_for,
)
from keras_towers.reduction.packing import (
    GradientPacker as GradientPacker,
    Packed as Packed,
)
from keras_towers.reduction.rank_sum import (
    RankSum as RankSum,
    SavedStates as SavedStates,
    sum_over_ranks as sum_over_ranks,
)
from keras_towers.reduction.stateful_hooks import (
    ErrorFeedback as ErrorFeedback,
    HookState as HookState,
    NesterovMomentum as NesterovMomentum,
    PowerSGD as PowerSGD,
    StatefulHook as StatefulHook,
    as_stateful as as_stateful,
)
