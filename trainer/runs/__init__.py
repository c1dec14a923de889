"""Training runs from beginning to end. It may import the whole trainer. Begin with `grpo`."""
