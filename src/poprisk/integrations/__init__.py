"""Thin bridges to trainers, loggers and optax; each is optional and imported by nobody else."""
