"""Types, errors, files and the signed protocol: what every other room uses."""
