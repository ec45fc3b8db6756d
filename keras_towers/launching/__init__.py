"""Starting and ending the processes of a job: ``keras-towers run``."""
