"""Scaling laws: points, isoFLOP profiles, L(N, D), report and chart."""
