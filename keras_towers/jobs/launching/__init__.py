"""Starting and ending the processes of a job: ``keras-towers run``.

``elastic_hosts``
  The hosts of an elastic job: how it shrinks and grows.
``function_job``
  Running a function of a notebook or a script as the ranks of a job.
``job``
  A job, in rounds: a round ends with its processes, and another may follow.
``late_entry``
  Enters a strategy's block when a script first needs it.
``outcome``
  The outcome of a job: who failed first and why, and the exit code.
``output``
  The output of many processes on one terminal, tagged by rank.
``rank_job``
  Runs a job's ranks, on the hosts that it has in each round.
``rank_process``
  Starts one process of a job, here or by ssh, with its environment.
``script_source``
  Checks that a script can be run, before processes run it.
``script``
  Runs a script in this process, as ``python script.py`` does.
``supervision``
  Watches the ranks of a job until it ends.
"""
