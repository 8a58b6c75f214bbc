"""Inr: task, study, figure and page."""
