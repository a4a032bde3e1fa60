"""Reproductions of the papers' figures and claims."""
