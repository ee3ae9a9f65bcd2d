"""What runs without the interpreter lock: compiled kernels, their arrays, their cache."""
