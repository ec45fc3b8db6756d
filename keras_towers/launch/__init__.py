"""Starting the processes of a job: ``keras-towers run``.

The rendezvous, the layout of ranks on hosts and the elastic driver are
Horovod's own (``horovod.runner``). Starting and ending processes is not: of
Horovod's launcher ``gloo_run`` cannot be told which address to listen on (it
takes all of them), raises one error whatever the exit code of the script was,
names the rank that happened to end first, leaves the children of a rank running
and does not end what it started on other hosts.
"""
