"""Parameter servers: processes that hold the weights, and workers that train.

What the files are, from the runtime up:

=====================  =======================================================
``remote``             calls and values on another process's device
``server_store``       what the processes of a job share by name
``serving``            the process of a parameter server
``connection``         a process's way to the others
``barrier``            meetings of workers that may die, come back or leave
``workers``            which workers are there
``server_variables``   copies of a model's variables on the servers
``session``            what a worker does during a ``fit``, and when
``direct_updates``     each worker applies its own gradients
``averaged_updates``   averages of the workers' gradients are applied
``early_updates``      the same, begun before the gradients have arrived
``served_calls``       how Keras's methods run on a worker
=====================  =======================================================

The strategies are in ``strategies/distributed.py`` and ``sync_replicas.py``.
"""
