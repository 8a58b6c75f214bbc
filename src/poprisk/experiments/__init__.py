"""One module per claim: a frozen config in, a result with its seeds and its uncertainty out."""
