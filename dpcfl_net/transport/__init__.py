"""Messages between coordinator, workers and observer: ZeroMQ, msgpack, CURVE."""
