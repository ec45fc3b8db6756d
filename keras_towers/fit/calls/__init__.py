"""One call of ``fit``, ``evaluate``, ... inside Keras's own loop.

``callback_effects``
  The effects of callbacks, which are made the same on all ranks.
``callback_roles``
  Callbacks: which ranks run them, and what they require of ``fit``.
``lone_call``
  Calls of Keras's methods that a rank makes alone, within a call of all ranks.
``model_building``
  Building of a model before its first step, as on one device.
``saving``
  Saving each file once, although every rank runs the whole script.
``tower_runner``
  Runs Keras's methods with synchronous steps on all towers.
``tower_call``
  One call of a Keras method, and its interface to Keras's own loop.
``keras_loop``
  The iterators and steps by which Keras's own loop runs a call on towers.
"""
