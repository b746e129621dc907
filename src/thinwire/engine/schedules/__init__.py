"""When averages are delivered and updates made: at the end of backward, or when layers need them."""
