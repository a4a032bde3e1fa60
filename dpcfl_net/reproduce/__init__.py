"""The papers' figures and claims, computed again."""
