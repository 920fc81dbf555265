"""Judgement without labels: signals, verdicts."""
