"""How Keras's own ``fit``, ``evaluate`` and ``predict`` run on towers.

Its parts, from the bottom up: ``options`` and ``contract``, ``context``,
``rank_agreement`` and ``step_errors``, ``weights``, ``data``, ``update`` and
``step``, ``calls``, ``keras_patches``.
"""
