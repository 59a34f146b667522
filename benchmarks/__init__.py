"""Benchmarks: programs that print figures, ours beside its rivals in one run, interleaved, as medians and ratios.

overhead   what the proxy costs a request: CPU, throughput, added latency
routing    where rollouts go: spread, prefix hits, makespan, on simulated replicas in virtual time
soak       whether anything grows, lags or fails with 5,000 rollouts in flight for minutes
chaos      whether anything is lost, wrong or stuck while something breaks every second
"""
