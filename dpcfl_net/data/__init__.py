"""Data sets, partitions and the slices of clients."""
