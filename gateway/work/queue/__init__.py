"""The queue: operations on rollouts and attempts, and the dispatcher that runs them.

It may import every layer from `store`, `http` and `prompts` down. Begin with `operations`.
"""
