"""`adapt` and `stream`: from a model, data and a profile to an adapted model."""
