"""Inspection of models: taps, outputs, layers in running order, blocks, state, and validation."""
