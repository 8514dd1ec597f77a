"""One engine over several hosts: rank 0 leads, the others make the same calls in the same order."""
