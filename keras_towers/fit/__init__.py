"""How Keras's own ``fit``, ``evaluate`` and ``predict`` run on towers.

Its parts, from the bottom up: ``contract``, ``context``, ``rank_agreement``,
``weights``, ``data``, ``update`` and ``step``, ``calls``, ``hooks``.
"""
