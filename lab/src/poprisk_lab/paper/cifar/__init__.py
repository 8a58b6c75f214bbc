"""Cifar: task, study, figure and page."""
