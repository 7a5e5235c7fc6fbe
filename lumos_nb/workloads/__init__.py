"""Workloads from configuration: ops and edges of jobs that need not have been recorded."""
