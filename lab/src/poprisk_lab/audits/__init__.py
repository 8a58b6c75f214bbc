"""Audits of training labels against the truth: how well wrong labels are ranked and counted."""
