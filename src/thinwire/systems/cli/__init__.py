"""The systems' verbs, one file each. Here, because a system's own package imports torch, and help must not."""
