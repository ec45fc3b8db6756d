"""Engines that carry tensors between processes, behind one small protocol."""

from keras_towers.transport.base import SingleProcess, Transport, next_key

__all__ = ["SingleProcess", "Transport", "next_key"]
