"""The errors that keras_towers raises itself."""


class TowerError(ValueError):
    """Bad input: says what was given, what is allowed and what to do."""


class CompatibilityError(ImportError):
    """The installed TensorFlow or Keras lacks a name that is needed here."""
