"""How the ranks of a job find, watch and check one another.

``commits``
  The backups of a job that starts again, as far as its launcher knows them.
``failed_calls``
  A call that fails on one rank ends on all ranks.
``file_store``
  A key-value store in a private folder, through which a job's ranks meet.
``hosts``
  The hosts of a job, named or allocated, and the placement of its ranks.
``launchers``
  Launchers of several processes, recognized by the variables they set.
``listening``
  TensorFlow servers that accept connections at a single address only.
``liveness``
  Decides which processes of a job are alive.
``local_store``
  A job's store, in the process that has its values.
``meet``
  The rendezvous of ranks that another launcher has started.
``network``
  Network addresses of this machine and of other machines.
``rank_checks``
  Comparisons of the ranks of a job: versions, scripts, and their next steps.
``rank_environment``
  The environment variables by which a launcher tells ranks of their job.
``reports``
  The reports of ranks on their progress, and what these say of others.
``signatures``
  Who may speak to a job's store: the token, and the signatures.
``store``
  The key-value store through which a job's processes meet.
``store_link``
  The connection of a process to the store of its job.
``store_server``
  The server of a job's store, at one address, for the job's own processes.
``tf_config``
  The cluster that ``TF_CONFIG`` describes, and this process's task in it.
``watch``
  Threads that watch which ranks this rank waits for, and which are gone.
``separate_training``
  Whether the processes of a job would each train a model of their own.
``activity``
  The activity of this rank: what it does, and in which exchanges it waits.
``joined_job``
  The job of this process, for transports that other packages add.
"""
