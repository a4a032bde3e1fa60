"""A lower bound on epsilon from canaries."""
