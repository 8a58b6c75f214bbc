"""Time axis: task, study, figure and page."""
