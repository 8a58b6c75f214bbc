"""Mnist influence: task, study, figure and page."""
