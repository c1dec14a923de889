"""The stage *replayed*: recorded calls are sent again. Also the gateway's own requests, which every stage uses.

It may import what `releases` may. Begin with `stage`.
"""
