"""One folder for each claim of the paper: task, study, figure, page."""
