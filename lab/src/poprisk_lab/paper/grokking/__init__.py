"""Grokking: task, study, figure and page."""
