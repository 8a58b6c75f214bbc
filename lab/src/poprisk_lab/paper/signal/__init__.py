"""Signal: task, study, figure and page."""
