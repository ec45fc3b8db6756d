"""The ``keras-towers`` command."""
