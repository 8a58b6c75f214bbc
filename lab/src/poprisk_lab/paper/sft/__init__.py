"""Sft: task, study, figure and page."""
