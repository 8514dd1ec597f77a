"""Kernels in C++ for the host's processors, and what Python needs to call them."""
