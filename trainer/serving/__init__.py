"""vLLM beside a run, and how weights get there and into production. Begin with `publish`."""
