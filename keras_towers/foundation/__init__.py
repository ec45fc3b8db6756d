"""What everything else stands on: errors, settings, the system, TensorFlow.

It knows no strategies, jobs or models.

``byte_sizes``
  Parses and formats numbers of bytes, for users.
``commands``
  Runs commands that end with all they started, and reads their output.
``compat``
  Every private name of TensorFlow and Keras that the package uses.
``errors``
  The errors that keras_towers raises.
``import_hooks``
  Hooks into Python's imports.
``incomplete_classes``
  Refuses classes of other packages that lack a method, before they run.
``message_lists``
  Lists in messages: the first few of many things, and how many more.
``notices``
  The package's log, and notices about normal operation in it.
``object_types``
  Types for objects of TensorFlow, Keras and users that come without one.
``settings``
  Environment variables, which ``docs/errors.md`` lists, and time limits.
``system``
  This machine and process: cores, folders, signals, memory, end.
``tf_strategy``
  TensorFlow's strategies, with types that TensorFlow does not declare.
"""
