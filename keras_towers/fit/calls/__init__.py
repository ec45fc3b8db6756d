"""One call of ``fit``, ``evaluate``, ... inside Keras's own loop."""
