"""Fair comparisons of optimizers: one search budget for every arm, stacked training runs, studies, a ledger."""
