"""Starting the processes of a job: ``keras-towers run``.

The rendezvous, the layout of ranks on hosts and the elastic driver are
Horovod's own (``horovod.runner``). Starting and stopping processes is not:
Horovod's ``gloo_run`` always listens on all addresses, discards the script's
exit code, blames whichever rank happened to end first, leaves child processes
of a rank running, and does not stop what it started on other hosts.
"""
