"""Labels: task, study, figure and page."""
