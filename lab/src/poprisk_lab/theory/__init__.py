"""Statements of the paper that only a study needs: replacement, diffusion rates, double descent."""
