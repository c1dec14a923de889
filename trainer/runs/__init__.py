"""Training runs from beginning to end. Begin with `grpo`."""
