"""Lorenz: task, study, figure and page."""
