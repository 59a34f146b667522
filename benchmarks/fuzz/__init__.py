"""Bad input to every reader of bytes that come from outside, by Hypothesis: each answers, or raises its own error.

`inputs` makes the bytes, `targets` says what reads them and what must hold, `run` counts and bounds. The suite takes a
few inputs of each target (tests/property/test_fuzz.py); `python -m benchmarks.fuzz` takes as many as it is told.
"""
