"""The stage *shadowed*: live calls are also sent to the candidate. It may import what `releases` may. Begin with
`stage`.
"""
