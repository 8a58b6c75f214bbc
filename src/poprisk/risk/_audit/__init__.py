"""Which training labels are wrong: an audit of a recorded run, in one table."""
