"""Scaling laws: the data points, isoFLOP profiles, the law L(N, D) of loss over parameters N and tokens D, report and
chart."""
