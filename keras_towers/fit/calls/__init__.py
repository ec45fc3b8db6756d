"""A call of ``fit`` or its like, as Keras's own loop meets it."""
