"""Fitted costs of kernels, collectives and the host, each with the error that held-out groups showed."""
