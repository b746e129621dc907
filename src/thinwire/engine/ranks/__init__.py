"""The other ranks: groups, small exchanges, and who is late."""
