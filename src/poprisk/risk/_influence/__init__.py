"""Influence of training examples: derivatives through the recorded run."""
