"""`ep-a2a doctor`: the state of this machine, what would go wrong on it, and the remedies.

The command runs where torch or Triton is absent or broken: only the self-test imports them. A process of its own
(probe_programs.py) asks each library and the CUDA driver, which may fail, crash or hang.

probe.py makes a SystemInfo (system_info.py): facts without judgement, so that tests can describe any broken machine.
The tables in checks_*.py make Diagnostics (diagnostic.py) of it. backend_verdict.py says which backend a configuration
gets.
"""
