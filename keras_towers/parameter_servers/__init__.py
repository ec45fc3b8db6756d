"""Parameter servers: processes that hold the weights, and workers that train.

The modules, from the runtime up:

=====================  =======================================================
``remote_runtime``     calls and values on another process's device
``server_store``       the job's key-value store
``server_process``     the process of a parameter server
``connection``         a worker's connection to servers and workers
``workers``            which workers train, have left, or are lost
``training_session``   the training of one model by all workers, and the
                       copies of its variables on the servers
``worker_updates``     updates by the average of the workers' gradients, or
                       by each worker itself
``early_updates``      averages whose updates begin before all gradients have
                       arrived
``worker_fit``         a ``fit`` of one worker, and its other calls
=====================  =======================================================

The strategies are in ``strategies/distributed_parameter_server.py`` and
``sync_replicas.py``.
"""
