"""The only folder that knows the inside of Keras.

Its rooms, each of which may import only what stands above it here:

================  ==========================================================
``contract``      what is asked of a strategy, and the pieces one is made of
``context/``      the tower that this thread runs; attributes that are ours
``data/``         batches for towers, and what ranks agree on about data
``weights/``      the models that live on towers, and where their variables are
``update/``       from the towers' gradients to new weights
``step/``         one global batch on all towers; its logs
``calls/``        a call of ``fit`` or its like, as Keras's own loop meets it
``asynchronous/`` calls and updates of towers that wait for nobody
``hooks/``        every name of Keras that is replaced while a scope is entered
================  ==========================================================
"""
