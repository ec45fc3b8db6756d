"""BytePS: its build, its transport, servers, strategy and drop-in.

``byteps_process``
  Starts BytePS in this process, and leaves its job when Python ends.
``byteps_recipe``
  The recipe that compiles an unpatched BytePS for a recent TensorFlow.
``byteps_servers``
  BytePS's scheduler and servers, beside the ranks of a job.
``byteps_strategy``
  The strategy of ranks that BytePS connects.
``byteps_transport``
  One process per device, connected by BytePS, which only sums vectors.
``dmlc``
  The environment variables with which BytePS's processes find one another.
"""
