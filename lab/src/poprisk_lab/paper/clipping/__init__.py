"""Clipping: task, study, figure and page."""
