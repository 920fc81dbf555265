"""Training: the interface of methods, steps, epochs, checkpoints."""
