"""Choose the plan: once, or from what is measured during training."""
