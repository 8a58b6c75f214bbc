"""Char language: task, study, figure and page."""
