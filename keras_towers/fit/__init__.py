"""How Keras's own ``fit``, ``evaluate`` and ``predict`` run on towers.

Its parts, from the bottom up: ``given_values``, ``options`` and ``places``,
``components``, ``context``, ``weights``, ``data``, ``ranks``, ``update``,
``step``, ``calls``, ``keras_patches``. But ``weights`` asks an ``update``,
which it is given.

``components``
  The components that a strategy is composed of.
``keras_patches``
  Every Keras name that strategies patch, and for how long.
``options``
  The options that strategies share: declared, documented and checked once.
``places``
  Where the steps of a call compute, and with whom.
``given_values``
  Checks given values against the annotations of what takes them.
"""
