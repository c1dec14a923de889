"""Credit, batches, losses: numbers in, numbers out. It speaks to no gateway and no network. Begin with `loss`."""
