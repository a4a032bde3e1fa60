"""Scripted malicious peers and a fuzzer, run against the product."""
