"""The performance-critical operations: arrays in, arrays out. Imported as `moejax.kernels`."""
