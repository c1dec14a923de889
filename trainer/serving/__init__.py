"""vLLM beside a run, and how weights get to it and into production.

It sees what `trainer` sees. Begin with `publish`.
"""
