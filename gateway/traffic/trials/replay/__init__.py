"""The stage *replayed*: recorded calls are sent again. Also the gateway's own requests, which every stage uses.

Begin with `stage`.
"""
