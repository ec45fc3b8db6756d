"""The only package that relies on Keras internals.

Each of its subpackages may import only from those listed above it:

================  ==========================================================
``contract``      the protocols that a strategy is composed of
``context/``      the current tower of a thread; patching of attributes
``data/``         per-tower batches; agreement between ranks on their data
``weights/``      models placed on towers, and where their variables live
``update/``       from per-tower gradients to new weights
``capture/``      a tower's step up to its optimizer, traced and analysed
``step/``         one global batch on all towers, and its logs
``calls/``        one call of ``fit``, ``evaluate``, ... inside Keras's loop
``hooks/``        every Keras name that is patched while a scope is active
``verify/``       a step on one device and on towers, recorded to compare them
================  ==========================================================
"""
