"""Exchanges among the towers of a process, and sums of gradients over ranks.

``Collectives`` is the protocol of what exchanges tensors among the devices of a
process: it sums, scatters, gathers and broadcasts K lists of N tensors, one
list per device.

=============================  ==============================================
``OnDevice()``                 all on the CPU (mode "host")
``OnTowers()``                 tensor i on tower i mod K (mode "towers")
``Hierarchical()``             two groups, then across (mode "hierarchical")
``CollectiveOps()``            TensorFlow's ops (modes "collective" and "nccl")
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
  Exchanges among devices by TensorFlow's collective ops, also over NCCL.
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
