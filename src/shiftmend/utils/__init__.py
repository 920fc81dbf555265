"""Small tools that know nothing of models: checks, devices, files, JSON, progress, random numbers."""
