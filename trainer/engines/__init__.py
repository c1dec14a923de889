"""What computes: the engine of one process, and verl's on several machines. Begin with `local`."""
