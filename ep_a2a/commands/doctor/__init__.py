"""`ep-a2a doctor`: what this machine has, what would go wrong on it, and what to do about that.

Everything here but the self-test needs the standard library alone, and runs where torch is absent or broken: torch,
Triton and the CUDA driver are asked by processes of their own (`probe_*.py`), which may fail.

probe.py makes a Machine (system_info.py), a description without judgement. checks.py judges it: small functions from a
Machine to Findings, so that tests can describe any broken machine. backend_verdict.py says which backend a
configuration gets.
"""
