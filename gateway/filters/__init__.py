"""The filter language: what a person asks of spans and rollouts. Begin with `query`; `sql` asks an index the same."""
