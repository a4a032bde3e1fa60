"""Attacks by a server on recorded runs, and audits."""
