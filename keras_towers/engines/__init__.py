"""Building engines and looking at them, without importing TensorFlow."""
