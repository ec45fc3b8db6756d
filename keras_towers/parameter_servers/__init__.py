"""Processes that train with parameter servers, on TensorFlow's own runtime."""
