"""Is there a gate that is noise-proof and quick? Variants from different ideas on noisy and clean tasks."""

from poprisk_lab.gates.plan import KIND, SMOKE, GateVariantsConfig, run, studies

__all__ = ["KIND", "SMOKE", "GateVariantsConfig", "run", "studies"]
