"""Models: their taps, outputs, layers in running order, blocks, state, and what keeps them from being used."""
