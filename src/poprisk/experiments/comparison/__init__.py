"""Fair comparison of optimizers: one search space and one budget per arm, fresh paired seeds for the report."""
