"""What `poprisk demo` computes and draws: AdamW and PopRiskAdamW on digits with wrong labels."""
