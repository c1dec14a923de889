"""One call as it is known: whose it is, whether it may pass, and what is recorded of it. Begin with `admission`."""
