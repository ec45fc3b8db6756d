"""Every Keras name that is patched while a scope is active."""
