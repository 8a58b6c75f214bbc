"""Fair comparisons of optimizers: arms with one search space and budget, stacked trainings, studies, a ledger."""
