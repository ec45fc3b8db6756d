"""TensorFlow's own runtime: tasks of ``TF_CONFIG``, and collectives."""
