"""Every name of Keras that is replaced while a scope is entered."""
