"""Statements of the paper that only a study needs, one module each: bounds, closed forms, rates and their premises."""
