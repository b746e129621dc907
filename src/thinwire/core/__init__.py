"""What a method is, what it sends, and what sending it costs: no ranks, and of the network only the collectives."""
