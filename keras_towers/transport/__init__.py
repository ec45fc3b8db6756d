"""Engines that carry tensors between processes, behind one small protocol."""

from keras_towers.transport.base import Transport
from keras_towers.transport.keys import next_key
from keras_towers.transport.single import SingleProcess

__all__ = ["SingleProcess", "Transport", "next_key"]
