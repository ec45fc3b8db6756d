"""Building engines from source, without importing TensorFlow."""
