"""Credit, batches, losses: numbers in, numbers out. It uses no gateway and no network. Begin with `loss`."""
