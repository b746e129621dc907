"""What a training remembers besides its weights: residuals, loss scale, checkpoints."""
