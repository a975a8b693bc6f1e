"""Measurements on the machine at hand."""
