"""The state of a running call, thread by thread, and temporary patches.

``identity_dict``
  A dictionary for keys without a usable ``==``, such as Keras variables.
``patches``
  Temporary patches of classes, modules and single objects.
``remat_scopes``
  Layers that users let run again: ``keras.RematScope``, ``keras.remat``.
``thread_state``
  The state of each thread: the step that it traces or runs, its blocks.
``without_collection``
  Pauses Python's garbage collector while a step is traced.
"""
