"""Several processes working on one batch: collectives and synchronised BatchNorm."""
