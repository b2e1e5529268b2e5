"""The outer loop: objectives, hyper-gradients, SVI over tasks, checkpoints."""
