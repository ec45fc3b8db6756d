"""The ``keras-towers`` command.

``bench``
  ``keras-towers bench``: which rows are compared, and their tables.
``doctor``
  ``keras-towers doctor``: what is installed, and what to do next.
``launch_plan``
  The processes that ``keras-towers run`` starts, or the one it becomes.
``main``
  The ``keras-towers`` command.
``plan``
  ``keras-towers plan``: what a model needs on several devices.
``plan_hosts``
  The time of a step on several hosts, for ``plan``.
``plots``
  Pictures of what ``keras-towers`` measures and plans, by matplotlib.
``run``
  ``keras-towers run``: start a script as the ranks of a distributed job.
``run_options``
  The arguments and options of ``keras-towers run``.
``installed``
  The installed packages, and the devices of this machine.
"""
