"""What an analysis computes: every section of the report as plain values. Nothing here draws."""
