"""Coupling: task, study, figure and page."""
