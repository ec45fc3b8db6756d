"""When a step computes and exchanges what, and the memory that this takes.

A program says what comes before what, not when. Here a ``Timeline`` is made of
it. Each module imports only those before it.

``timeline``
  A timeline: when a program computes and exchanges what.
``gathers``
  When a step gathers weights in shards, within ``gather_bytes``.
``sliced_weights``
  Large weights in shards, gathered, used, exchanged and updated in slices.
``memory_estimate``
  An estimate of the memory of a tower at each time of a step.
``local_step``
  The step of one of several processes that exchange nothing within a step.
``gradient_buckets``
  Buckets of gradients, which towers exchange during the backward pass.
``segments``
  Divides a step into segments that are recomputed.
``kept_results``
  Chooses the results to keep, rather than recompute.
``rematerialization``
  Rematerialization: recomputes activations instead of keeping them.
``schedule``
  The schedule: in which order a program's operations run.
"""
