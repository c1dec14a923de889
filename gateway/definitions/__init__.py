"""What servers of tools say of themselves, as versions: read, fingerprinted, kept on the tape, and held to.

`reading` reads a list and what differs in it, `operations` keeps versions, `service` remembers them for calls. It may
import `store`, `dialects` and what lies below. Begin with `reading`.
"""
