"""Verification without labels: signals, verdicts about features, estimated scores and class shares."""
