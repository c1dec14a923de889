"""Credit, batches, losses: numbers in, numbers out. Begin with `loss`."""
