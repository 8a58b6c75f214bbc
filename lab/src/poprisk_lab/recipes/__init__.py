"""Which recipe to recommend: averaged weights, held-back blocks and stopping rules, measured and judged by RULE.md."""
