"""The agent's own process: its environment, its output, its end. Begin with `process`."""
