"""Pinn: task, study, figure and page."""
