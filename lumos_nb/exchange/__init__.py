"""Workloads in the formats of others."""
