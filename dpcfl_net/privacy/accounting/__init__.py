"""Epsilon of compositions of mechanisms, and noise for a target."""
