"""The page on scaling."""
