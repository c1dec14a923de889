"""The data plane: the life of one call. Begin with `call`."""
