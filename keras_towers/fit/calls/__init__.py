"""One call of ``fit``, ``evaluate``, ... inside Keras's own loop.

``callback_effects``
  Makes the effects of callbacks the same on all ranks.
``callback_roles``
  The roles of callbacks: which ranks run them, and where ``fit`` starts.
``keras_loop``
  Connects Keras's own loop to a call: its iterator and its steps.
``lone_call``
  Calls of Keras's methods that a rank makes alone, within a call of all ranks.
``meeting``
  Meetings of ranks while code of the user runs within a call.
``model_building``
  What of a model is made, and the step that makes the rest of it.
``saving``
  Saves each file once, although every rank runs the whole script.
``tower_call``
  A call of a Keras method on towers, and its interface to Keras's own loop.
``tower_runner``
  Runs Keras's methods with synchronous steps on all towers.
"""
