"""The state of a running call, thread by thread, and temporary patches.

``identity_dict``
  A dictionary for keys without a usable ``==``, such as Keras variables.
``patches``
  Temporary patches of classes, modules and single objects.
``recomputed_calls``
  Layers under ``keras.RematScope`` or ``keras.remat``, in a step on towers.
``remat_scopes``
  Which operations of a trace users ask to compute again, as in a RematScope.
``thread_state``
  State of each thread: the step that it traces or runs, and its blocks.
``without_collection``
  Pauses Python's garbage collector while a step is traced.
``step_errors``
  Errors of steps as a user sees them, with notes on what failed.
"""
