"""Default choice: task, study, figure and page."""
