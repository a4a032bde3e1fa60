"""The papers' figures computed again, each beside what the paper says of it; one file a figure or family of figures."""
