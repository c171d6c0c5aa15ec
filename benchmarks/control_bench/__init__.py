"""What `benchmarks/control.py` runs: loads, policies to compare with, and its report."""
