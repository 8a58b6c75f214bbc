"""Empirical tangent kernels of a model at given weights: in full, in tiles, as products; their drift and timescales."""
