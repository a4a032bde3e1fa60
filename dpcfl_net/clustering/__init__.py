"""Clustering of model updates: mixtures, separation scores, rebalancing."""
