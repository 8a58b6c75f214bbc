"""The lab next door: what tests the claims of the paper, compares optimizers and chose the defaults of poprisk."""
