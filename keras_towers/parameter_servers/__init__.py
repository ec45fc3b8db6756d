"""Parameter servers: processes that hold the weights, and workers that train.

The modules, from the runtime up:

=====================  =======================================================
``remote_runtime``     calls and values on another process's device
``key_value_store``    facts about the job: who has started, failed or ended
``server_process``     the process of a parameter server
``connection``         a worker's connection to servers and workers
``workers``            which workers train, have left, or are lost
``server_variables``   the copies of a model's variables on the servers
``training_session``   the training of one model by all workers: how their
                       gradients become the next weights
``worker_fit``         a ``fit`` of one worker, and its other calls
=====================  =======================================================

The strategies are in ``strategies/parameter_server_strategies.py`` and
``replica_strategies.py``.
"""
