"""TensorFlow's own runtime: the tasks of ``TF_CONFIG``, and collectives."""
