"""Population risk from one batch: the rate of a step, the best step, its leave-one-out risk, and gradient variances."""
