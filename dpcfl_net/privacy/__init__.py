"""Mechanisms, events, slots of plans, randomness, accounting and ledgers."""
