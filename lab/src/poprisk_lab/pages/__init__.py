"""What several result pages share."""
