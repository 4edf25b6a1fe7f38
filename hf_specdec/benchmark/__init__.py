"""Measuring: what a round costs and what it could cost at least."""
