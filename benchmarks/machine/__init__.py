"""What the machine at hand does: samples of its kernels, collectives, host and lookups (`make calibrate`)."""
