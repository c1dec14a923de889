"""The queue: operations on rollouts and attempts, and the dispatcher that runs them.

Begin with `operations`.
"""
