"""Masking rules: values that a person wants to keep off the tape, found by a regular expression or by their place in
JSON.

`rules` are the person's settings; the patterns in `text` and the paths of `gateway.wire.json_paths` find values for
them. `text` also maps a text to the bytes that it was written with, `stream_frames` cuts a stream into its events,
`streams` joins texts that a stream has cut apart, `body_search` searches the texts of a body, and `masker` masks it. A
body to which a rule cannot be applied for sure is not kept. Pure. Begin with `masker`.
"""
