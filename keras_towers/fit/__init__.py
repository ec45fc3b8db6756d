"""The only package that relies on Keras internals.

Its parts, from the bottom up: ``contract``, ``context``, ``data``, ``weights``,
``update``, ``capture``, ``step``, ``calls``, ``hooks``. Each may import
only from those before it; ``docs/architecture.md`` says what each owns.
"""
