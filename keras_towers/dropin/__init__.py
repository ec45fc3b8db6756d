"""What the drop-ins for Horovod's and BytePS's modules have in common."""
