"""Teacher: task, study, figure and page."""
