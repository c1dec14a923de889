"""A million calls of mixed kinds through one gateway that is killed and reloaded: begin at `harness`."""
