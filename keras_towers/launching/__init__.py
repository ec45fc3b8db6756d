"""Starting and ending the processes of a job: ``keras-towers run``.

``elastic_hosts``
  The hosts on which a job may run: as given, or as a program finds them.
``function_job``
  Running a function of a notebook or a script as the ranks of a job.
``job``
  A job, in rounds: a round ends with its processes, and another may follow.
``late_entry``
  A block that is entered when a script first needs it.
``outcome``
  How processes of a job ended, and why.
``output``
  Output of many processes on one terminal, tagged by rank.
``rank_job``
  A job whose processes are ranks, on the hosts that it has in each round.
``rank_process``
  One process of a job, started here or by ssh, and its environment.
``script_source``
  Checks a script before processes run it.
``script``
  Runs a script in this process, as ``python script.py`` does.
``supervision``
  Watches the ranks of a job until it ends.
"""
