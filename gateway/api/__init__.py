"""The control API: one module for each resource, and what they share. Begin with `routes`, the table."""
