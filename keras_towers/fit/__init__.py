"""How Keras's own ``fit``, ``evaluate`` and ``predict`` run on towers.

Its parts, from the bottom up: ``options`` and ``places``, ``components``,
``context``, ``weights``, ``plain_settings`` and ``call_agreement``,
``step_errors``, ``data``, ``step_agreement``, ``step_clock`` and
``step_order``, ``update``, ``step``, ``calls``, ``keras_patches``. But
``weights`` asks an ``update``, which it is given.

``call_agreement``
  Agreement of all ranks on the arguments of a method that they call.
``components``
  The components that a strategy is composed of.
``keras_patches``
  Every Keras name that strategies patch, and for how long.
``options``
  The options that strategies share: declared, documented and checked once.
``places``
  Where the steps of a call compute, and with whom.
``plain_settings``
  The plain settings of a model's layers and optimizers.
``step_agreement``
  Whether all ranks are about to take the same step, on the same data.
``step_clock``
  Marks in a training step: the times at which towers reach certain points.
``step_errors``
  The errors of steps that a user sees, with notes on what failed.
``step_order``
  The order of steps, and of their exchanges, on all ranks.
"""
