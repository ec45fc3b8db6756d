"""Engines that carry tensors between processes, behind one small protocol."""

from keras_towers.transport.base import SingleProcess, Transport
from keras_towers.transport.keys import next_key

__all__ = ["SingleProcess", "Transport", "next_key"]
