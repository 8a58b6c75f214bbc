"""Leverage: each example's prediction without it, from the tangent kernels of some recorded steps."""
