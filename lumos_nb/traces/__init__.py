"""Readers and writers of traces, each to or from the one event table."""
