"""Training: methods as an interface, steps, epochs, checkpoints."""
