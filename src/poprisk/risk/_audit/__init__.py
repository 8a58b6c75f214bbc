"""An audit of a recorded run: the training labels that are probably wrong, in one table."""
