"""Mechanisms, randomness, accounting and the ledgers of clients."""
