"""Nouns as people see them: text, tables for terminals, pages, charts. Pure. Begin with `table`."""
