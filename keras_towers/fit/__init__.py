"""How Keras's own ``fit``, ``evaluate`` and ``predict`` run on towers.

Its parts, from the bottom up: ``contract``, ``rank_agreement``, ``context``,
``data``, ``weights``, ``update``, ``step``, ``calls``, ``hooks``.
"""
