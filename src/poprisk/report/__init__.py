"""Figures and tables of saved results; nothing is computed here."""
