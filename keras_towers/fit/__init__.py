"""Runs Keras's own ``fit``, ``evaluate`` and ``predict`` on towers.

Its parts, from the bottom up: ``given_values``, ``options`` and ``places``,
``components``, ``context``, ``current_tower``, ``weights``, ``data``,
``ranks``, ``update``, ``step``, ``calls``, ``keras_patches``. But ``weights``
asks an ``update``, which it is given.

``components``
  The components that a strategy is composed of.
``keras_patches``
  Patches Keras and TensorFlow while a strategy is in scope; lists all patches.
``options``
  Options that several strategies share: declared, documented and checked.
``places``
  Places: where the steps of a call compute, and with whom.
``given_values``
  Checks the values of arguments against their annotations.
``current_tower``
  Querying the current tower, and running code on each tower.
"""
