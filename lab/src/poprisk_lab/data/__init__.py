"""Data sets and weights that the studies read."""
