"""Releases: moving traffic from one version to another as an experiment that can be taken back."""
