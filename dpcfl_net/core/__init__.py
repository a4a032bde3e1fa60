"""Types, errors, files and the signed protocol, used by all other packages."""
