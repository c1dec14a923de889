"""The agent's own process: its environment, its output, its end. It sees what `sidecar` sees. Begin with `process`."""
