"""The common base of the drop-ins for Horovod's and BytePS's modules."""
