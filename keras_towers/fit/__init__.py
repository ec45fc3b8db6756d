"""How Keras's own ``fit``, ``evaluate`` and ``predict`` run on towers.

Its parts, from the bottom up: ``contract``, ``context``, ``data``, ``weights``,
``update``, ``step``, ``calls``, ``hooks``; ``docs/architecture.md`` says what
each owns.
"""
