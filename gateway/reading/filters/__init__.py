"""The filter language for spans and rollouts. Begin with `query`; `sql` translates a filter for an index."""
