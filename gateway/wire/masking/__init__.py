"""Masking rules: values that a person wants to keep off the tape, found by a regular expression or by their place in
JSON.

`masker` has the person's settings and masks bodies and texts by them; `bodies` searches one body by its format,
`streams` cuts a stream into its events and joins texts that it has cut apart, and `text` has the patterns and maps a
text to the bytes that it was written with. A body to which a rule cannot be applied for sure is not kept. Pure. Begin
with `masker`.
"""
