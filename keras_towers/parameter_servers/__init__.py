"""Processes that train with parameter servers, on TensorFlow's own runtime.

A task of the role ``ps`` serves; every other one is a client of its own, and
shares resources with the others by their names.
"""
