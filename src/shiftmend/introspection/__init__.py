"""What a model is: its taps, outputs, layers in running order, blocks and state."""
