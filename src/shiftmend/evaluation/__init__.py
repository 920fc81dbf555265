"""Scores with labels: classification, calibration, regression."""
