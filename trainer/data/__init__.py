"""What is learnt from: rollouts, conversations, tasks. Begin with `collect`."""
