"""What a step will take: costs measured on this machine, a step simulated, methods ranked."""
