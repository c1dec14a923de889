"""Masking rules: what a person wants to keep off the tape, by a regular expression or by its place in JSON.

`rules` is what the person writes, `paths` and `patterns` are how a rule looks for it. `json_walk` finds values in JSON,
`text` leads from a text back to the bytes that it was written with, `framing` cuts a stream into its events, `streams`
joins texts that a stream has cut apart, `looking` goes through the texts of a body, and `masker` decides what becomes
of it. A body that a rule cannot be applied to for sure is not kept. Pure. It may import `dialects` and `model`. Begin
with `masker`.
"""
