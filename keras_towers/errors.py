"""The errors that keras_towers raises itself."""


class TowerError(ValueError):
    """Bad input: says what was given, what is allowed and what to do."""

    # AutoGraph copies errors out of a tf.function with their class only where
    # it knows how to make one.
    __init__ = Exception.__init__


class CompatibilityError(ImportError):
    """The installed TensorFlow or Keras lacks a name that is needed here."""
