"""Who runs the programs: a thread beside backward (Gloo), side streams (NCCL), or the caller (one rank)."""
