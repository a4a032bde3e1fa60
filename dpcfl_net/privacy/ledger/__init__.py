"""Durable ledgers of clients, and the record book over several runs."""
