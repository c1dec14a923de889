"""What can be trained on, and why not. Pure. Begin with `findings`, one rule at a time."""
