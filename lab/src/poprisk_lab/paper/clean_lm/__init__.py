"""Clean lm: task, study, figure and page."""
