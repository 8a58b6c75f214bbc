"""Capacity: task, study, figure and page."""
