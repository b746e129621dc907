"""The other ranks: groups, small exchanges, and which rank is late."""
