"""Risk honesty: task, study, figure and page."""
