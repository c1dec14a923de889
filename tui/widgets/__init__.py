"""The pieces of the terminal, for any view."""
