"""Parameter servers: processes that hold the weights, and workers that train.

The modules, from the runtime up:

``remote_runtime``
  Functions and devices of TensorFlow's runtime on other processes.
``key_value_store``
  A job's key-value store: a hash table on a parameter server.
``server_process``
  The process of a parameter server, until training has ended.
``server_connection``
  A worker's connection to the parameter servers and the other workers.
``workers``
  The workers of a ``fit``: which ones have left, failed or died.
``server_variables``
  The variables on parameter servers: copies of a model's variables.
``training_session``
  A session: the training of one model by all workers of a job.
``async_updates``
  Asynchronous updates: each worker applies its gradients on the servers.
``worker_fit``
  A ``fit`` of one worker, which resumes after its last batch.
``server_tasks``
  Parameter servers beside the workers of a job, on this machine.
``averaged_updates``
  Averaged updates: servers apply the mean of all workers' gradients.
``worker_runner``
  Runs calls on workers of parameter servers, and passes on gradients.

The strategies are in ``strategies/parameter_server_strategies.py`` and
``replica_strategies.py``.
"""
