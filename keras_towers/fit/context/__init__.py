"""The state of a running call, thread by thread, and temporary patches.

``identity_dict``
  A dictionary for keys without a usable ``==``, such as Keras variables.
``patches``
  Temporary patches of classes, modules and single objects.
``recomputed_calls``
  What users let recompute: ``keras.RematScope``, ``keras.remat``.
``remat_scopes``
  What users let a step recompute, which the schedule of a step does.
``thread_state``
  State of each thread: the step that it traces or runs, and its blocks.
``without_collection``
  Pauses Python's garbage collector while a step is traced.
``step_errors``
  Errors of steps as a user sees them, with notes on what failed.
"""
