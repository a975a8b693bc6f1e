"""Measures plain against speculative decoding on one machine."""
