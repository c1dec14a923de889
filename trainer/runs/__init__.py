"""Training runs from beginning to end. They may import the whole trainer. Begin with `grpo`."""
