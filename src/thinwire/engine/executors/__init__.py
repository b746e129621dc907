"""What runs the programs: a thread alongside backward (Gloo), side streams (NCCL), or the caller (one rank)."""
