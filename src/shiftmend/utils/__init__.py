"""Utilities independent of models: checks, devices, files, JSON, progress, random numbers."""
