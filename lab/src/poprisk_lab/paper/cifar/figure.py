"""The figure of CIFAR-10 with human labels: the one of the other studies of wrong labels on images."""

from poprisk_lab.paper.labels.figure import draw

__all__ = ["draw"]
