"""How Keras's own ``fit``, ``evaluate`` and ``predict`` run on towers.

Its parts, from the bottom up: ``options`` and ``contract``, ``context``,
``plain_settings``, ``rank_agreement`` and ``step_errors``, ``weights``,
``data``, ``update`` and ``step``, ``calls``, ``keras_patches``.

``contract``
  The components that a strategy is composed of.
``keras_patches``
  Every Keras name that strategies patch, and for how long.
``marks``
  Marks in a training step: the times at which towers reach certain points.
``options``
  The options of all strategies: declared, documented and checked once.
``plain_settings``
  What a model's layers and optimizers are set to, as far as it is plain.
``places``
  Where the steps of a call compute, and with whom.
``rank_agreement``
  What all ranks have to agree on: calls, and the variables of models.
``step_errors``
  The errors of steps that a user sees, with notes on what failed.
``step_order``
  Order and agreement of steps, and of their collectives, over all ranks.
"""
