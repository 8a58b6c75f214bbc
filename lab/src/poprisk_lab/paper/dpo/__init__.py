"""Dpo: task, study, figure and page."""
