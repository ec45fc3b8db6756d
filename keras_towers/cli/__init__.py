"""The ``keras-towers`` command.

``bench``
  ``keras-towers bench``: which rows are compared, and their tables.
``bench_plot``
  A picture of the step times that ``keras-towers bench`` has measured.
``doctor``
  ``keras-towers doctor``: what is installed, and what to do next.
``main``
  The ``keras-towers`` command.
``plan``
  ``keras-towers plan``: what a model needs on several devices.
``plan_hosts``
  The time of a step on several hosts: the table and the curve of ``plan``.
``run``
  ``keras-towers run``: start a script as the ranks of a distributed job.
``memory_plot``
  A picture of the memory of a device during a planned step.
"""
