"""How a run comes about: configuration, defaults, the loop, the run folder, checkpoints, temperatures."""
