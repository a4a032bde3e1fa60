"""Adversaries and audits: scripted attackers to run against one's own changes, and attacks on recorded runs."""
