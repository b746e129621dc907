"""The state of a training besides its weights: residuals, loss scale, checkpoints."""
