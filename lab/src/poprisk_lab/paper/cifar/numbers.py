"""Numbers of CIFAR-10 with human labels: tables and verdicts of the other studies of wrong labels on images."""

from poprisk_lab.paper.labels.numbers import claims, lines

__all__ = ["claims", "lines"]
