"""How the ranks of a job find, watch and check one another.

``activity``
  What this rank does, and in which exchanges it waits.
``commits``
  The backups of a job that starts again, as its launcher knows them.
``failed_calls``
  Makes a call that fails on one rank end on all ranks.
``file_store``
  A key-value store in a private folder, through which a job's ranks meet.
``hosts``
  The hosts of a job, named or allocated, and the placement of its ranks.
``joined_job``
  ``kt.extending.join_job``: the job of this process, for other transports.
``launchers``
  Launchers of several processes, recognized by the variables they set.
``listening``
  TensorFlow servers that accept connections at a single address only.
``liveness``
  Decides which processes of a job are alive, by how long they are silent.
``local_store``
  A job's store in the process that holds its values.
``meet``
  The rendezvous of ranks that another launcher has started.
``network``
  Network addresses of this machine and of other machines.
``rank_checks``
  Gathers and compares plain values of the ranks, such as versions and steps.
``rank_environment``
  The environment variables by which a launcher tells ranks of their job.
``rank_helper``
  The helper process of a rank that another launcher has started.
``reports``
  The ranks' reports on their progress: who is late, and who waits in vain.
``separate_training``
  Refuses processes of a job that would each train a model of their own.
``signatures``
  Authenticates requests to a job's store: the token, and the signatures.
``store``
  The key-value store through which the processes of a job meet.
``store_server``
  The server of a job's store, and the format of requests.
``tf_config``
  The cluster that ``TF_CONFIG`` describes, and this process's task in it.
``watch``
  Threads that watch for ranks that are late or gone.
"""
