"""The stage *replayed*: recorded calls are asked again. Also requests of the gateway's own, which every stage uses.

It sees what `releases` sees. Begin with `stage`.
"""
