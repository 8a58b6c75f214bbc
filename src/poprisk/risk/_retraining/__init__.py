"""A recorded run trained again many times at once, as one stacked computation."""
