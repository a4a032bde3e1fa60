"""Attacks of a server on recorded runs, and audits."""
