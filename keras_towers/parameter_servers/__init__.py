"""Parameter servers: processes that hold the weights, and workers that train.

The modules, from the runtime up:

=====================  =======================================================
``remote``             calls and values on another process's device
``server_store``       the job's key-value store
``serving``            the process of a parameter server
``connection``         a worker's connection to servers and workers
``workers``            which workers train, have left, or are lost
``server_variables``   copies of a model's variables on the servers
``session``            the training of one model by all workers
``averaged_updates``   updates that average the workers' gradients
``early_updates``      the same, begun before all gradients have arrived
``async_updates``      updates that every worker makes by itself
``served_fit``         a ``fit`` of one worker
``served_calls``       calls of Keras's methods on a worker
=====================  =======================================================

The strategies are in ``strategies/distributed.py`` and ``sync_replicas.py``.
"""
