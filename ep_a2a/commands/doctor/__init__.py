"""`ep-a2a doctor`: the state of this machine, what would go wrong on it, and what to do about that.

All modules but those of the self-test need the standard library alone, so the command runs where torch is absent or
broken. Processes of their own (`probe_*.py`) ask torch, Triton, the CUDA driver and a backend's library, which may
fail, crash or hang.

probe.py makes a SystemInfo (system_info.py): facts without judgement, so that tests can describe any broken machine.
The tables in checks_*.py make Diagnostics (diagnostic.py) of it. backend_verdict.py says which backend a configuration
gets.
"""
