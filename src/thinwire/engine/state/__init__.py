"""What a training remembers beside its weights: residuals, loss scale, checkpoints."""
