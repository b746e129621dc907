"""When averages are delivered and updates made: at the end of backward, or as layers are needed."""
