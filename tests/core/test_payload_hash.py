"""The hash of payloads: published values of BLAKE3, and how bytes are passed."""

from __future__ import annotations

from dpcfl_net.core.payload_hash import NOTHING, hasher, payload_hash

# https://github.com/BLAKE3-team/BLAKE3/blob/master/test_vectors/test_vectors.json: bytes 0 to 250, again and again.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


def test_published_values():
    for length, expected in VECTORS.items():
        data = bytes(k % 251 for k in range(length))
        assert payload_hash(data) == expected
    assert VECTORS[0] == NOTHING == payload_hash() == payload_hash(b"", memoryview(b""))


def test_the_hash_does_not_depend_on_the_cut():
    data = bytes(k % 251 for k in range(102400))
    parts = [memoryview(data)[:1], bytearray(data[1:70_000]), data[70_000:]]
    found = hasher()
    for part in parts:
        found.update(part)
    assert payload_hash(*parts) == found.hexdigest() == VECTORS[102400]
