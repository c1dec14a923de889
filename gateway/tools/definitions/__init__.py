"""The definitions that servers of tools list, as versions: read, fingerprinted, kept on the tape, and enforced.

`list_answer` reads a list and compares it, `operations` keeps versions, `service` remembers them for calls. It may
import `store`, `dialects` and what lies below. Begin with `list_answer`.
"""
