"""What a step learns from: rollouts, conversations, tasks. It sees what `trainer` sees. Begin with `collect`."""
