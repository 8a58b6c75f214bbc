"""Sobolev slope: task, study, figure and page."""
