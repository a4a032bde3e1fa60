"""One file for each algorithm, server and client part."""
