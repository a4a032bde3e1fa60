"""Algorithms, one file each, with server part and client part."""
