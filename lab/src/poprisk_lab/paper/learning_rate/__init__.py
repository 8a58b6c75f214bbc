"""Learning rate: task, study, figure and page."""
