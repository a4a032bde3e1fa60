"""Secure aggregation: the server learns the sum of a round's vectors, and nothing about one of them."""
