"""Parameter servers: processes that hold the weights, and workers that train.

What the files are, from the runtime up:

=====================  =======================================================
``remote``             calls and values on another process's device
``server_store``       what the processes of a job share by name
``serving``            the process of a parameter server
``connection``         a process's way to the others
``workers``            which workers are there
``server_variables``   copies of a model's variables on the servers
``session``            what the workers share of a model that they train
``async_updates``      each worker applies its own gradients
``averaged_updates``   averages of the workers' gradients are applied
``early_updates``      the same, begun before the gradients have arrived
``served_fit``         what a worker does during a ``fit``, and when
``served_calls``       how Keras's methods run on a worker
=====================  =======================================================

The strategies are in ``strategies/distributed.py`` and ``sync_replicas.py``.
"""
